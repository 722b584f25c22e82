// Data of messages that the sender puts into the receiver's memory: MPI_Put in chunks, MPI_Win_flush, then a version by MPI_Put.
//
// The receiver owns its pool. It grants a sender some slots of a chunk each in its answer to the first header, and they are that sender's
// from then on. For each transfer the sender takes some of its free slots, says in the header which, and fills them in turn; who sees a
// chunk's version in its slot sees the chunk. The receiver reads the chunks where they are and says by a put of its own, a credit, how many
// it has taken: then their slots may be filled anew. So changing peers need nothing collective, the data reaches a receiver that computes,
// and what is on the way is bounded by the slots. What gets none goes by messages.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/mpi/messages.hpp"
#include "transport/mpi/remote_memory.hpp"
#include "transport/transport.hpp"

namespace fog::mpi {

// From this process to one other.
class OutgoingPut {
 public:
  // Whether the data is read here no more; how much of it, from its beginning on, is not.
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
  size_t slots_ = 0; // none before they are granted
  size_t chunks_put_ = 0;
  size_t chunks_published_ = 0;
  size_t credit_ = 0; // which word of them
  bool done_ = false;
  bool may_be_overwritten_ = false; // up to sent()
  c10::DataPtr copy_;
  uint32_t tag_ = 0; // for the case that it has to go by messages
  std::shared_ptr<TransferOwner> owner_;
  Messages::Sent ended_;
};

// All that goes out of a process. Every call needs the engine's lock.
class NotifiedPuts {
 public:
  NotifiedPuts(RemoteMemory& memory, Messages& messages);

  // Whether data for that peer can go so: it has slots, or has not refused any so far.
  bool reaches(PeerId peer) const;
  // Sends `header` and the data. `ended` hears how it ends that the data is read, as that of Messages::send_data(). Null if there is nothing
  // left to keep track of it with: then it has to go by messages.
  std::shared_ptr<OutgoingPut> send(
      PeerId peer,
      Header header,
      const void* data,
      bool may_be_overwritten,
      const std::shared_ptr<TransferOwner>& owner,
      Messages::Sent ended);
  // The memory of `owner` may change from now on.
  void withdraw(const TransferOwner& owner);
  // `peer` has ended.
  void forget(PeerId peer);

  // What a peer says of slots it has asked for; DistBackendError where it cannot be.
  void on_slots(PeerId source, const Header& header);

  // Puts one chunk at most; true if anything moved.
  bool poll();
  // MPI cannot be called any more.
  void give_up();
  // What its receiver reads in its own memory needs nothing from here.
  bool sending() const {
    return !going_.empty();
  }
  std::vector<std::shared_ptr<TransferOwner>>& released() {
    return released_;
  }

 private:
  // What this process has at a peer.
  struct Granted {
    enum class State { kNone, kAsked, kHas, kRefused } state = State::kNone;
    OneSided::Address at = 0;
    std::vector<bool> taken; // by slot
    std::vector<std::shared_ptr<OutgoingPut>> waiting; // for slots to be granted
  };
  std::atomic<uint64_t>& credit(size_t index) const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(credits_ + index * kLine);
  }
  // Slots for that put; false if there are none free.
  bool place(OutgoingPut& put, Granted& granted);
  void say_placed(const OutgoingPut& put);
  void go_by_message(const std::shared_ptr<OutgoingPut>& put);
  // What goes wrong in act() is the failure of this transfer.
  template <typename Act>
  void attempt(OutgoingPut& put, Act&& act);
  // Puts the next chunk, if it may; true if anything moved.
  bool step(OutgoingPut& put);
  // The data is read no more; without a text it was withdrawn, or its receiver is lost, and nobody hears of it.
  void end(OutgoingPut& put, const std::optional<std::string>& error);
  // Gives its slots back if the receiver has taken all.
  bool settle(const OutgoingPut& put);
  static constexpr size_t kLine = 64;

  RemoteMemory& memory_;
  Messages& messages_;
  char* credits_ = nullptr;
  std::vector<size_t> free_credits_;
  uint64_t next_transfer_ = 1;
  std::unordered_map<PeerId, Granted> granted_;
  std::list<std::shared_ptr<OutgoingPut>> going_; // with data to put
  std::list<std::shared_ptr<OutgoingPut>> resting_; // whose slots are not free yet
  std::list<std::shared_ptr<OutgoingPut>> lost_; // whose memory MPI may read for ever
  std::vector<std::shared_ptr<TransferOwner>> released_;
};

} // namespace fog::mpi
