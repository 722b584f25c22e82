// How bytes reach other processes. What stands above knows this interface only, and nothing below knows an operation.
//
// Every message starts with a header that the receiver gets before it has asked for anything: it learns who wants what, so a message
// that nobody expects is seen and reported rather than waiting for ever. Small data comes with the header. Of large data the receiver
// sees blocks, wherever they lie: "bytes a to b are readable here". Memory in flight is bounded by chunks, not by the size of tensors.
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
#include "transport/block.hpp"
#include "transport/doorbell.hpp"
#include "transport/message.hpp"
#include "transport/one_sided.hpp"

namespace fog {

// Whose memory others read or write; kept until they are done with it.
class TransferOwner {
 public:
  virtual ~TransferOwner() = default;
  // Something has changed in one of its transfers. Is called with the engine's lock.
  virtual void on_progress() = 0;
};

// Bytes on their way to one or several peers. Every call needs the engine's lock.
class Outgoing {
 public:
  // A copy that the owner makes without the lock, and then hands to filled(), also if it has failed meanwhile.
  struct Fill {
    char* to = nullptr;
    const char* from = nullptr;
    size_t bytes = 0;
  };

  virtual ~Outgoing() = default;
  // Whether nobody reads the bytes any more; whether that peer does not.
  virtual bool done() const = 0;
  virtual bool done(PeerId peer) const = 0;
  // So many bytes, from the first on, are not read any more.
  virtual size_t sent() const = 0;
  // What the owner is to copy next, if anything.
  virtual std::optional<Fill> next_fill() {
    return std::nullopt;
  }
  virtual void filled(const Fill& fill) {}

  std::string error; // why it failed, if it did
  PeerId failed_peer = -1; // to whom
};

// Bytes on their way from a peer. Every call needs the engine's lock.
class Incoming {
 public:
  virtual ~Incoming() = default;
  // So many bytes, from the first on, have come.
  virtual size_t available() const = 0;
  // Where bytes `from` to `to`, which have come, can be read until they are taken.
  virtual void read(size_t from, size_t to, std::vector<Block>& blocks) const = 0;
  // The first `bytes` have been read. False if the sender had given up: what was read may be anything.
  virtual bool take(size_t bytes) = 0;
  // Whether they come straight into their place, and need not be copied there.
  virtual bool in_place() const {
    return false;
  }

  std::string error;
};

// The receiver's process has ended. Those that use messages know how to name it.
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

// Who takes the messages.
class MessageHandler {
 public:
  virtual ~MessageHandler() = default;
  // `data` holds header.bytes bytes if they came with the header, else nullptr.
  virtual void on_message(PeerId source, const Header& header, const char* data) = 0;
  // Whether a process is known to have ended: nothing must be sent there.
  virtual bool has_ended(PeerId peer) = 0;
  // Whether a message may go there now. Else it is not known yet whether that process is still there; soon it is.
  virtual bool may_send(PeerId peer) {
    return true;
  }
  // Whether it has said goodbye: it reads what has come, and its memory may be gone at any time.
  virtual bool is_leaving(PeerId peer) {
    return false;
  }
};

// Every call needs the engine's lock, but those that say otherwise.
class Transport {
 public:
  // Data of at most so many bytes comes with its header, whatever the way.
  static constexpr size_t kInlineBytes = 8192;
  // On one host more may: two copies are cheaper there than to wait until the receiver has read it.
  static constexpr size_t kLocalInlineBytes = 32768;

  virtual ~Transport() = default;

  // --- peers ---
  // The processes of the job that messages went to, or came from.
  virtual std::vector<PeerId> spoken_with() const = 0;
  virtual bool has_spoken_with(PeerId peer) const = 0;
  // Whether a message to that process of this host waits for space on its way out.
  virtual bool waits_for_space(PeerId peer) const {
    return false;
  }
  // This process ends in good order. Those whom it has not spoken with learn it when it has ended, without a message.
  virtual void depart() {}
  struct Ended {
    PeerId peer;
    bool silent; // its host does not answer, rather than its system having said so
    bool departed; // it had said that it would
    std::chrono::milliseconds drain; // what it has sent before may come for so long
  };
  // Those of which it was seen since the last call.
  virtual std::vector<Ended> ended() = 0;
  // This process waits for that peer, or is about to use its memory: its end is to be noticed. Of one that messages go to it is anyway.
  virtual void watch(PeerId peer) {}
  // What peers of this host need to attach() this process; empty where the system cannot share memory.
  virtual std::string address() const = 0;
  // `peer` is process `pid` of this host: its end is noticed from now on, and messages go through shared memory, if that can be mapped.
  virtual void attach(PeerId peer, int pid, const std::string& address) = 0;
  // Whether they do.
  virtual bool shares_memory(PeerId peer) const = 0;
  // How large data goes there: "shared memory", "rma" or "messages".
  virtual const char* way_to(PeerId peer) const {
    return "messages";
  }
  // A process that has ended takes nothing any more; one that has destroyed its group nothing of that.
  virtual void forget(PeerId peer) = 0;
  virtual void forget(PeerId peer, uint64_t group) = 0;

  // --- messages ---
  struct Destination {
    PeerId peer;
    double scale = 1.0; // the sender's weight for this receiver
    bool wants_confirm = false;
    bool data_waits = false; // large data by messages, until go() says that it may
  };
  enum class Memory {
    kStays, // the data is untouched until the transfer is done
    kOverwritten, // its first Outgoing::sent() bytes may be overwritten before
    kMessages, // it stays, and nobody else is to read it where it is, nor is the owner to copy: it goes as a message
  };
  struct Sent {
    std::shared_ptr<Outgoing> outgoing; // null if all was copied, and may be reused at once
    std::vector<PeerId> answered; // that what is taken tells as much as a confirmation
  };
  // Sends the same header and data to several peers. Throws Unreachable, or DistBackendError for what MPI reports. `owner` is kept until
  // the transfer is done.
  virtual Sent send(
      c10::ArrayRef<Destination> destinations,
      const Header& header,
      const void* data,
      Memory memory,
      const std::shared_ptr<TransferOwner>& owner) = 0;
  // The same of a header with at most kInlineBytes, which are copied.
  void send(PeerId destination, const Header& header, const void* data = nullptr) {
    send(Destination{destination, header.scale, header.wants_confirm != 0}, header, data, Memory::kStays, nullptr);
  }
  // The data of a message that does not come with its header. To `place`; where that is null it is to be read where it lies, or will.
  virtual std::shared_ptr<Incoming> receive(
      PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner) = 0;

  // Data that `owner` sends to `destination` waits no more.
  virtual void go(PeerId destination, const TransferOwner& owner) {}
  // `peer` has asked for it (or not any more): what is sent there stays here until an operation there takes it.
  virtual void hold_back(PeerId peer, bool hold) = 0;
  // Withdraws what `owner` sends: from now on its memory may change.
  virtual void withdraw(const TransferOwner& owner) = 0;
  // Nobody takes the data of this message, which has come.
  virtual void ignore(PeerId source, const Header& header) = 0;
  // Withdraws all that is on its way of a group that has failed.
  virtual void withdraw_group(uint64_t group) = 0;

  // --- one-sided ---
  // How this process reaches that peer's memory while it takes no part; null where it cannot.
  virtual OneSided* one_sided(PeerId peer) {
    return nullptr;
  }

  // Whether the network's own sums are not done, of groups that have failed as well.
  virtual bool has_sums_in_flight() const {
    return false;
  }

  // --- progress ---
  // Looks for news once; true if anything arrived or was completed.
  virtual bool poll() = 0;
  // Whether something may come that rings no bell.
  virtual bool must_poll() = 0;
  // What large data does that rings no bell.
  enum class Flow {
    kNone, // there is none on its way
    kStill, // nothing of it moved at the last look
    kMoves, // some of it did: more will come sooner than any sleep ends
  };
  virtual Flow flow() const {
    return Flow::kNone;
  }
  // Whether messages of this process may still be on their way out of it.
  virtual bool sending() const = 0;
  // Nothing can come or go between hosts any more. False if that was known.
  virtual bool give_up() = 0;
  // Owners whose last transfer ended; their memory is to be released without the lock.
  virtual std::vector<std::shared_ptr<TransferOwner>> take_released() = 0;

  // --- for any thread, without the lock ---
  // What rings when something comes.
  virtual Doorbell& bell() = 0;
  // Whether something has come that nobody has looked at.
  virtual bool news() const = 0;
  // Whether messages wait for space on their way out.
  virtual bool waiting_for_space() const = 0;
};

} // namespace fog
