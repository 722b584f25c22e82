// Message data that the sender puts into the receiver's memory: MPI_Put in chunks, MPI_Win_flush, then a version by
// MPI_Put.
//
// The receiver owns its pool. In its answer to the first header it grants the sender some slots of one chunk each, for
// good. For each transfer the sender takes some of its free slots, names them in the header, and fills them in turn.
// When the receiver sees the version of a chunk in its slot, it also sees the chunk. It reads chunks in place and tells
// the sender, by the wire, how many it has taken; their slots may then be filled again. So a change of peers needs no
// collective call, data reaches a receiver that computes, and the slots bound the data on its way. Data without slots
// goes by the wire. If puts wait until their target calls MPI, data is put once an operation there takes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/mpi/remote_memory.hpp"
#include "transport/tcp/messages.hpp"
#include "transport/transport.hpp"

namespace fog::mpi {

// A transfer from this process to one other.
class OutgoingPut {
 public:
  // done(): the data here is not read any more. sent(): the bytes from the beginning that are not read any more.
  bool done() const {
    return done_;
  }
  size_t sent() const;

 private:
  friend class NotifiedPuts;
  PeerId peer_ = -1;
  uint64_t transfer_ = 0;
  const char* data_ = nullptr;
  size_t bytes_ = 0;
  size_t first_slot_ = 0;
  size_t slots_ = 0; // 0 before they are granted
  size_t chunks_put_ = 0;
  size_t chunks_published_ = 0;
  size_t chunks_taken_ = 0;
  bool wanted_ = false; // the data may be put
  bool done_ = false;
  bool may_be_overwritten_ = false; // up to sent()
  c10::DataPtr copy_;
  uint32_t tag_ = 0; // used if it has to go by the wire
  std::shared_ptr<TransferOwner> owner_;
  tcp::Sent ended_;
};

// All notified puts of a process. Every call needs the engine's lock.
class NotifiedPuts {
 public:
  NotifiedPuts(RemoteMemory& memory, tcp::Messages& wire);

  // Returns whether data for that peer can use puts: the peer has granted slots, or has not refused them so far.
  bool reaches(PeerId peer) const;
  // Sends `header` and the data. `ended` is called when the data is not read any more, as in tcp::Messages::send_data().
  // Returns null if no slot is free; the data then has to go by the wire.
  std::shared_ptr<OutgoingPut> send(
      PeerId peer,
      Header header,
      const void* data,
      bool may_be_overwritten,
      const std::shared_ptr<TransferOwner>& owner,
      tcp::Sent ended);
  // The memory of `owner` may change from now on.
  void withdraw(const TransferOwner& owner);
  // Handles the end of `peer`.
  void forget(PeerId peer);

  // Handles the slots that a peer grants. Throws DistBackendError if they are not valid.
  void on_slots(PeerId source, const Header& header);
  // The receiver has taken chunks of a transfer, or takes the data now.
  void on_taken(PeerId source, const Header& header);
  void on_wanted(PeerId source, const Header& header);

  // Puts at most one chunk. Returns true if data moved.
  bool poll();
  // Records that MPI cannot be called any more.
  void give_up();
  // Data in the receiver's memory needs no more work from here.
  bool sending() const {
    return !going_.empty();
  }
  std::vector<std::shared_ptr<TransferOwner>>& released() {
    return released_;
  }

 private:
  // The slots of this process at a peer.
  struct Granted {
    enum class State { kNone, kAsked, kHas, kRefused } state = State::kNone;
    RemoteMemory::Address at = 0;
    std::vector<bool> taken; // by slot
    std::vector<std::shared_ptr<OutgoingPut>> waiting; // puts that wait for slots
  };
  // Finds slots for that put. Returns false if none are free.
  static bool place(OutgoingPut& put, Granted& granted);
  static void set_taken(const OutgoingPut& put, Granted& granted, bool taken);
  // Returns a transfer to that peer; null if its end is known.
  std::shared_ptr<OutgoingPut> find(PeerId peer, uint64_t transfer) const;
  void say_placed(const OutgoingPut& put);
  void go_by_wire(const std::shared_ptr<OutgoingPut>& put);
  // Runs act(). Errors become failures of this transfer.
  template <typename Act>
  void attempt(OutgoingPut& put, Act&& act);
  // Puts the next chunk if allowed. Returns true if data moved.
  bool step(OutgoingPut& put);
  // Ends the transfer: the data is not read any more. Without `error`, because it was withdrawn or its receiver is
  // lost, no callback is called.
  void end(OutgoingPut& put, const std::optional<std::string>& error);

  RemoteMemory& memory_;
  tcp::Messages& wire_;
  uint64_t next_transfer_ = 1;
  std::unordered_map<PeerId, Granted> granted_;
  std::unordered_map<uint64_t, std::shared_ptr<OutgoingPut>> puts_; // by transfer: all whose receivers have not taken everything
  std::list<std::shared_ptr<OutgoingPut>> going_; // those with data to put
  std::unordered_map<uint64_t, std::shared_ptr<OutgoingPut>> lost_; // transfers whose memory MPI may read forever
  std::vector<std::shared_ptr<TransferOwner>> released_;
};

// The receiver's side: the slots that it lends, and the data that arrives in them. Every call needs the engine's lock.
class PutArrivals {
 public:
  PutArrivals(RemoteMemory& memory, tcp::Messages& wire) : memory_(memory), wire_(wire) {}

  // --- messages of peers; they throw DistBackendError if these are not valid ---
  void on_announcement(PeerId source, const Header& header);
  void on_placed(PeerId source, const Header& header);

  std::shared_ptr<Incoming> receive(PeerId source, const Header& header, const std::shared_ptr<TransferOwner>& owner);
  // No operation will receive this data.
  void ignore(PeerId source, const Header& header);
  // `owner` reads no more data.
  void abandon(const TransferOwner& owner);
  // No more data of that group is received.
  void withdraw_group(uint64_t group);
  // Handles the end of `source`.
  void forget(PeerId source);

  // Checks for arrived data. Returns true if there is any.
  bool poll();
  // Returns whether an operation waits for data.
  bool must_poll() const {
    return waiting_ > 0;
  }
  // Records that MPI cannot be called any more.
  void give_up();

 private:
  class Arrival;
  // The slots that a peer has here.
  struct Lent {
    char* memory = nullptr;
    size_t slots = 0;
  };

  void grant(PeerId source);
  void take_by_wire(Arrival& arrival, const std::shared_ptr<TransferOwner>& owner);
  // Tells the sender that an operation takes the data (kWanted), or that `taken` chunks, or kAll, were taken (kTaken).
  void tell(const Arrival& arrival, MessageKind kind, size_t taken);
  void close(Arrival& arrival);
  template <typename Which>
  void close_all(Which&& which);

  RemoteMemory& memory_;
  tcp::Messages& wire_;
  std::unordered_map<PeerId, Lent> lent_;
  std::map<std::pair<PeerId, uint64_t>, std::shared_ptr<Arrival>> arrivals_; // by source and its transfer
  size_t waiting_ = 0; // number of arrivals that an operation waits for
  size_t lent_bytes_ = 0;
  bool warned_ = false;
};

} // namespace fog::mpi
