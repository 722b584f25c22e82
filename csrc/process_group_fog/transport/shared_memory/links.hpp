// Short messages between processes of one host, through a ring for each pair and direction.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/shared_memory/arena.hpp"
#include "transport/shared_memory/inbox.hpp"
#include "transport/message.hpp"

namespace fog::shared_memory {

// Peers are ranks of the world. Every call needs the engine's lock, except news(), waiting_for_space(), address() and
// doorbell().
class Links {
 public:
  // _FOG_LOCAL_LINKS=0 (`on` is false) leaves everything to TCP. The setting may differ between ranks: a rank without an
  // inbox neither attaches to others nor is attached by them. Ranks from `size` to below `max_ranks` may come later.
  Links(int rank, int size, int max_ranks, bool on);
  // The ranks below `ranks` may share this host, this one among them; the number is the same on all of them. Each has a
  // ring in the inboxes of the others.
  void settle(int ranks);

  // Returns the address for attach() on peers; empty if the system cannot share memory. If `with_arena`, the arena is
  // created now; its size depends on the number of local ranks.
  std::string address(bool with_arena) const;

  // Sends messages to `peer` through its inbox from now on, if that can be mapped. It may be called twice, first with
  // an address that lacks the arena.
  void attach(int peer, const std::string& address);
  // Forgets the process that had this number and has ended, so that another one can be attached in its place. That one
  // must not attach this process before it sees that this process has attached it.
  void renew(int peer);
  // Reverts attach(), for a peer that turns out to be on another host.
  void detach(int peer);
  bool reaches(int peer) const {
    return has_place(peer) && links_[peer].inbox != nullptr;
  }
  // Returns whether `peer` has mapped this process's arena and `data` is in it.
  bool mapped_by(int peer, const void* data, size_t bytes) const;
  bool maps_arena(int peer) const {
    return has_said(peer, Inbox::kMaps);
  }
  // Returns whether `peer` has mapped this process's inbox.
  bool attached_by(int peer) const {
    return has_said(peer, Inbox::kAttached);
  }

  // Never fails: messages for which the ring has no space wait here.
  void send(int peer, const Header& header, const void* data, size_t bytes);
  // Writes messages that wait for space. Returns true if any was written.
  bool flush();
  // Returns whether any message has gone to that peer or come from it.
  bool has_spoken_with(int peer) const {
    return reaches(peer) && (inbox_->ring(peer).used() || inbox_of(peer).ring(rank_).used());
  }
  // depart() announces that this process ends in good order; has_departed() returns whether `peer` has done so. This
  // costs no message.
  void depart() const {
    if (inbox_) {
      inbox_->depart();
    }
  }
  bool has_departed(int peer) const {
    return reaches(peer) && inbox_of(peer).departed();
  }
  // Tells `peer`, when it looks next, that this process counts it as lost.
  void expel(int peer);
  // Returns the peers that count this process as lost, and have not been returned before.
  std::vector<int> expelled_by();
  // Returns whether the data of a transfer from `peer`, which has just been read, is valid, see Inbox::stands().
  bool stands(int peer, uint64_t transfer, uint32_t before) const {
    return inbox_of(peer).stands(transfer, before) && !has_said(peer, Inbox::kLost);
  }
  // The signs of life of this process, and those of a peer that is reached.
  Pulse& pulse() {
    return inbox_ ? inbox_->pulse() : own_pulse_;
  }
  std::optional<Signs> signs_of(int peer) const {
    return reaches(peer) ? std::make_optional(read_signs(inbox_of(peer).pulse(), std::chrono::steady_clock::now())) : std::nullopt;
  }
  // Returns the bytes that wait for space on the way to `peer`.
  size_t unsent(int peer) const {
    return has_place(peer) ? links_[peer].unsent : 0;
  }
  bool waiting_for_space() const {
    return queued_ > 0;
  }
  // A peer that has ended receives no more messages.
  void forget(int peer);

  // Calls take(peer, record, bytes) for each message that has arrived, in the order of each peer. Returns true if there
  // was any.
  template <typename Take>
  bool poll(Take&& take) {
    bool any = false;
    const int count = source_count_.load(std::memory_order_relaxed);
    for (int index = 0; index < count; ++index) {
      const int peer = sources_[index];
      auto& ring = inbox_->ring(peer);
      bool taken_any = false;
      for (int handled = 0; handled < kMessagesPerPoll; ++handled) {
        if (!ring.take_one([&](const char* record, size_t bytes) { take(peer, record, bytes); })) {
          break;
        }
        taken_any = true;
      }
      if (taken_any) {
        any = true;
        // Pairs with the fence in write(). The space is visible before this reads whether the writer waits for it, and
        // a writer checks for space again after it has set that flag.
        std::atomic_thread_fence(std::memory_order_seq_cst);
      }
      if (ring.writer_waits.load(std::memory_order_relaxed) != 0 && ring.writer_waits.exchange(0) != 0 && reaches(peer)) {
        links_[peer].inbox->doorbell().ring();
      }
    }
    return any;
  }
  bool news() const;
  Doorbell& doorbell() {
    return inbox_ ? inbox_->doorbell() : own_doorbell_;
  }

  // The inbox of this process, which exists if any peer is reached, and that of a peer that is reached.
  const Inbox& inbox() const {
    return *inbox_;
  }
  const Inbox& inbox_of(int peer) const {
    return *links_[peer].inbox;
  }
  // Returns it as an object that outlives the peer: it is unmapped when nobody reads there any more, also if another
  // process has taken the peer's place.
  std::shared_ptr<const Inbox> shared_inbox_of(int peer) const {
    return has_place(peer) ? links_[peer].inbox : nullptr;
  }
  // Returns the number of ranks that the world can have.
  int max_ranks() const {
    return max_ranks_;
  }
  // Returns the number of peers on this host.
  int peers() const {
    return source_count_.load();
  }

  // Returns the arena of `peer`; nullptr if it cannot be mapped, or the peer has ended.
  std::shared_ptr<const ForeignArena> arena_of(int peer) const {
    return has_place(peer) ? links_[peer].arena : nullptr;
  }

 private:
  static constexpr int kMessagesPerPoll = 64; // enough to empty a burst, few enough to return to other work soon

  struct Link {
    std::shared_ptr<Inbox> inbox; // the peer's
    std::deque<std::vector<char>> queue; // records for which its ring has no space
    size_t unsent = 0; // bytes of these
    std::shared_ptr<const ForeignArena> arena;
  };
  void map_arena(int peer, const std::string& address);
  bool has_place(int peer) const {
    return static_cast<size_t>(peer) < links_.size();
  }
  bool has_said(int peer, uint32_t what) const {
    return inbox_ && has_place(peer) && (inbox_->peer(peer).load(std::memory_order_acquire) & what) != 0;
  }
  bool write(Link& link, const void* first, size_t first_bytes, const void* second, size_t second_bytes, bool loud);

  const int rank_;
  const int max_ranks_;
  std::unique_ptr<Inbox> inbox_;
  Doorbell own_doorbell_ = {}; // if there is no inbox
  Pulse own_pulse_ = {}; // if there is no inbox
  std::vector<Link> links_; // by peer
  std::vector<int> sources_; // peers that may write to the inbox; news() reads the first source_count_ without the lock
  std::atomic<int> source_count_{0};
  std::atomic<size_t> queued_{0};
  std::vector<int> expelled_by_; // peers that expelled_by() has returned
};

} // namespace fog::shared_memory
