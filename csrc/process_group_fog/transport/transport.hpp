// The interface to other processes. The layers above know only this interface, and the layers below know no operations.
//
// Every message starts with a header that reaches the receiver unasked, with the operation and its arguments. So an
// unexpected message is noticed and reported, and does not wait forever. Small data comes with the header. The receiver
// gets large data as blocks, wherever they are: "bytes a to b are readable here". Memory in flight is bounded by
// chunks, not by the size of tensors.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/ArrayRef.h>

#include "core/failure.hpp"
#include "core/peer.hpp"
#include "transport/block.hpp"
#include "transport/doorbell.hpp"
#include "transport/message.hpp"
#include "core/pulse.hpp"

namespace fog {

namespace mpi {
class RemoteMemory;
} // namespace mpi

// The owner of memory that others read or write. It is kept alive until they are done.
class TransferOwner {
 public:
  virtual ~TransferOwner() = default;
  // Called, with the engine's lock, when one of its transfers has changed.
  virtual void on_progress() = 0;
};

// Bytes on their way to one or several peers. Every call needs the engine's lock.
class Outgoing {
 public:
  // A copy that the owner makes without the lock, and then reports to filled(), even if the transfer has failed
  // meanwhile.
  struct Fill {
    char* to = nullptr;
    const char* from = nullptr;
    size_t bytes = 0;
  };

  virtual ~Outgoing() = default;
  // Returns whether the bytes are not read any more: by any peer, or by this peer.
  virtual bool done() const = 0;
  virtual bool done(PeerId peer) const = 0;
  // Returns how many bytes, from the first on, are not read any more.
  virtual size_t sent() const = 0;
  // Returns the next copy for the owner to make, if any.
  virtual std::optional<Fill> next_fill() {
    return std::nullopt;
  }
  virtual void filled(const Fill& fill) {}

  std::string error; // the reason if it failed
  PeerId failed_peer = -1; // the receiver for which it failed
};

// Bytes on their way from a peer. Every call needs the engine's lock.
class Incoming {
 public:
  virtual ~Incoming() = default;
  // Returns how many bytes, from the first on, have arrived.
  virtual size_t available() const = 0;
  // Adds the blocks of bytes `from` to `to`, which have arrived. They are readable until they are taken.
  virtual void read(size_t from, size_t to, std::vector<Block>& blocks) const = 0;
  // The first `bytes` have been read. Returns false if the sender had withdrawn the transfer; the data is then not
  // valid.
  virtual bool take(size_t bytes) = 0;
  // Returns whether the data arrives directly in its place and needs no copy.
  virtual bool in_place() const {
    return false;
  }
};

// The receiver's process has ended. Callers know the name to use in an error.
class Unreachable : public std::exception {
 public:
  explicit Unreachable(PeerId peer) : peer_(peer) {}
  PeerId peer() const {
    return peer_;
  }
  const char* what() const noexcept override {
    return kLost;
  }

 private:
  const PeerId peer_;
};

// The receiver of messages.
class MessageHandler {
 public:
  virtual ~MessageHandler() = default;
  // `data` holds header.bytes bytes if they came with the header; otherwise it is nullptr.
  virtual void on_message(PeerId source, const Header& header, const char* data) = 0;
  // What it knows about the other processes. Messages must not be sent to one that is lost.
  virtual const Peers& peers() const = 0;
};

// Every call needs the engine's lock unless its comment says otherwise.
class Transport {
 public:
  // Data of at most this size comes with its header on every transport.
  static constexpr size_t kInlineBytes = 8192;
  // On one host the limit is higher: two copies cost less than waiting until the receiver has read the data.
  static constexpr size_t kLocalInlineBytes = 32768;

  virtual ~Transport() = default;

  // --- peers ---
  // Returns the processes of the job to which messages went or from which they came.
  virtual std::vector<PeerId> spoken_with() const = 0;
  virtual bool has_spoken_with(PeerId peer) const = 0;
  // Returns the bytes of messages to that process that wait for space.
  virtual size_t unsent(PeerId peer) const {
    return 0;
  }
  // Announces that this process ends in good order to those without any message from it.
  virtual void depart() {}
  struct Ended {
    PeerId peer;
    Peer::State state; // what it becomes
    const char* how; // what to say about its end, unless it had announced it
  };
  // Returns the processes whose end has been noticed since the last call.
  virtual std::vector<Ended> ended() = 0;
  // Watches for the end of that peer, because this process waits for it or is about to use its memory. Receivers of
  // messages are watched anyway.
  virtual void watch(PeerId peer) {}
  // The signs of life of this process, for its peers.
  virtual Pulse& pulse() {
    return own_pulse_;
  }
  // Returns those of a peer, if they can be seen.
  virtual std::optional<Signs> signs_of(PeerId peer) {
    return std::nullopt;
  }
  // Tells a process, when it looks next, that this one counts it as lost. Its messages are ignored from now on, and
  // data that it reads from this process is not valid any more.
  virtual void expel(PeerId peer) {}
  // Returns the peers that count this process as lost, and have not been returned before.
  virtual std::vector<PeerId> expelled_by() {
    return {};
  }
  // Returns the address with which peers of this host attach() this process; empty if the system cannot share memory.
  virtual std::string address() const = 0;
  // `peer` is process `pid` of this host. Its end is noticed from now on, and messages go through shared memory if that
  // can be mapped.
  virtual void attach(PeerId peer, int pid, const std::string& address) = 0;
  // `peer` is to be reached at these addresses over TCP, except for what goes through shared memory: connects with it.
  virtual void connect(PeerId peer, const std::string& tcp) {}
  // Returns whether `peer` knows this process by attach() or connect(), so that messages of both sides arrive.
  virtual bool is_connected_with(PeerId peer) const {
    return false;
  }
  // Returns whether an address of the peer is known.
  virtual bool knows(PeerId peer) const {
    return shares_memory(peer);
  }
  // Forgets the process of `peer`, which was forgotten as lost, so that another process can take its place.
  virtual void renew(PeerId peer) {}
  // Returns whether messages go through shared memory.
  virtual bool shares_memory(PeerId peer) const = 0;
  // Returns how large data is sent there: "shared memory", "rma", "rma, exchanges only" (windows use messages) or "tcp",
  // with more words where it takes several connections.
  virtual std::string way_to(PeerId peer) const {
    return "shared memory";
  }
  // A process that has ended receives no more messages, and one that has destroyed its group no more of that group.
  virtual void forget(PeerId peer) = 0;
  virtual void forget(PeerId peer, uint64_t group) = 0;

  // --- messages ---
  struct Destination {
    PeerId peer;
    double scale = 1.0; // the sender's weight for this receiver
    bool wants_confirm = false;
    bool only_sender = false; // no other rank sends to it meanwhile, so a part of the data may go before it asks
  };
  enum class Memory {
    kStays, // the data does not change until the transfer is done
    kOverwritten, // its first Outgoing::sent() bytes may be overwritten before
    // the data does not change, but is sent as a message: peers do not read it in place, and the owner makes no copies
    kMessages,
  };
  struct Sent {
    std::shared_ptr<Outgoing> outgoing; // null if everything was copied, and the memory may be reused at once
    std::vector<PeerId> answered; // peers for which taking the data counts as confirmation
  };
  // Sends the same header and data to several peers. Throws Unreachable, or DistBackendError if an address is not
  // known. `owner` is kept alive until the transfer is done.
  virtual Sent send(
      c10::ArrayRef<Destination> destinations,
      const Header& header,
      const void* data,
      Memory memory,
      const std::shared_ptr<TransferOwner>& owner) = 0;
  // Sends a header with at most kInlineBytes of data, which are copied.
  void send(PeerId destination, const Header& header, const void* data = nullptr) {
    send(Destination{destination, header.scale, header.wants_confirm != 0}, header, data, Memory::kStays, nullptr);
  }
  // Receives the data of a message that does not come with its header. It goes to `place`; if that is null, the owner
  // reads it where it arrives.
  virtual std::shared_ptr<Incoming> receive(
      PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner) = 0;

  // Data for `peer` stays here from now on (or no longer) until an operation there takes it, because `peer` has asked
  // for that.
  virtual void hold_back(PeerId peer, bool hold) = 0;
  // Withdraws the transfers of `owner`: its memory may change from now on.
  virtual void withdraw(const TransferOwner& owner) = 0;
  // No operation will receive the data of this message.
  virtual void ignore(PeerId source, const Header& header) = 0;
  // Withdraws all transfers of a group that has failed.
  virtual void withdraw_group(uint64_t group) = 0;

  // --- one-sided ---
  // Returns the access to that peer's memory without its help; null if there is none.
  virtual mpi::RemoteMemory* one_sided(PeerId peer) {
    return nullptr;
  }

  // --- progress ---
  // Checks for news once. Returns true if data arrived or a transfer completed.
  virtual bool poll() = 0;
  // Returns whether news may come that does not ring the doorbell.
  virtual bool must_poll() = 0;
  // Returns whether large data that does not ring the doorbell has moved lately: more will come before any sleep would end.
  virtual bool data_moves() const {
    return false;
  }
  // Returns whether messages of this process may still be on their way out of it.
  virtual bool sending() const = 0;
  // Ends the use of MPI, which cannot be called any more. Returns false if this was known.
  virtual bool give_up() = 0;
  // Returns owners whose last transfer has ended. Their memory must be released without the lock.
  virtual std::vector<std::shared_ptr<TransferOwner>> take_released() = 0;

  // --- any thread, without the lock ---
  // Returns the doorbell that news rings.
  virtual Doorbell& bell() = 0;
  // Returns whether there is news that has not been handled.
  virtual bool news() const = 0;
  // Returns whether messages wait for space.
  virtual bool waiting_for_space() const = 0;
  // Call after Doorbell::listen() and before the sleep: some news rings the bell only after this.
  virtual void before_sleep() {}

 private:
  Pulse own_pulse_ = {};
};

} // namespace fog
