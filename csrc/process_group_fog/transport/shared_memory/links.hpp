// Short messages between processes of one host: a ring from each to each.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transport/shared_memory/arena.hpp"
#include "transport/shared_memory/foreign_arena.hpp"
#include "transport/shared_memory/inbox.hpp"
#include "transport/message.hpp"

namespace fog::shared_memory {

// Peers are ranks of the world. Every call needs the engine's lock, except news(), waiting_for_space(), address() and doorbell().
class Links {
 public:
  // FOG_LOCAL_LINKS=0 (not `on`) leaves everything to MPI. Ranks need not agree: without an inbox this one attaches to nobody, and nobody
  // to it.
  Links(int rank, int size, bool on);
  // Who may share this host, this rank among them; the same on all these. Each has a ring in the inboxes of the others, so what there is for
  // peers goes by their number and not by the world's.
  void settle(const std::vector<int>& local);

  // What peers need to attach(); empty where the system cannot do it. The arena, which takes its size from the number of local ranks, is made
  // now if it is to be told as well.
  std::string address(bool with_arena) const;

  // From now on messages to `peer` go through its inbox, if that can be mapped. Its address may come twice, first without its arena.
  void attach(int peer, const std::string& address);
  // Not any more: it is not of this host.
  void detach(int peer);
  bool reaches(int peer) const {
    return places_[peer] >= 0 && links_[places_[peer]].inbox != nullptr;
  }
  // Whether `peer` finds `data` in this process's arena, which it has mapped.
  bool mapped_by(int peer, const void* data, size_t bytes) const;
  bool maps_arena(int peer) const {
    return has_said(peer, Inbox::kMaps);
  }
  // Whether `peer` has mapped this process's inbox.
  bool attached_by(int peer) const {
    return has_said(peer, Inbox::kAttached);
  }
  // Whether all other ranks of the world send to this one through its inbox: then nothing comes over MPI unasked.
  bool attached_by_all();

  // Never fails: what the ring has no space for waits here.
  void send(int peer, const Header& header, const void* data, size_t bytes);
  // Writes what waits for space; true if something was.
  bool flush();
  // Bytes that wait for space on the way to `peer`.
  size_t unsent(int peer) const {
    return places_[peer] < 0 ? 0 : links_[places_[peer]].unsent;
  }
  bool waiting_for_space() const {
    return queued_ > 0;
  }
  // A peer that has ended takes nothing any more.
  void forget(int peer);

  // Calls take(peer, record, bytes) for each message that has come, oldest first for each peer; true if any had.
  template <typename Take>
  bool poll(Take&& take) {
    bool any = false;
    const int count = source_count_.load(std::memory_order_relaxed);
    for (int index = 0; index < count; ++index) {
      const int peer = sources_[index];
      auto& ring = inbox_->ring(places_[peer]);
      bool taken_any = false;
      for (int handled = 0; handled < kMessagesPerPoll; ++handled) {
        if (!ring.take_one([&](const char* record, size_t bytes) { take(peer, record, bytes); })) {
          break;
        }
        taken_any = true;
      }
      if (taken_any) {
        any = true;
        // Pairs with the fence in write(): the space is visible before this looks whether the writer waits for it, and a writer
        // looks for space once more after it has said so.
        std::atomic_thread_fence(std::memory_order_seq_cst);
      }
      if (ring.writer_waits.load(std::memory_order_relaxed) != 0 && ring.writer_waits.exchange(0) != 0 && reaches(peer)) {
        link(peer).inbox->doorbell().ring();
      }
    }
    return any;
  }
  bool news() const;
  Doorbell& doorbell() {
    return inbox_ ? inbox_->doorbell() : own_doorbell_;
  }

  // This process's inbox, which there is where a peer is reached; that of a peer that is reached.
  const Inbox& inbox() const {
    return *inbox_;
  }
  const Inbox& inbox_of(int peer) const {
    return *links_[places_[peer]].inbox;
  }
  // How many peers of this host there are.
  int peers() const {
    return source_count_.load();
  }

  // The arena of `peer`; nullptr if it cannot be mapped, or the peer has ended.
  std::shared_ptr<const ForeignArena> arena_of(int peer) const {
    return places_[peer] < 0 ? nullptr : links_[places_[peer]].arena;
  }

 private:
  static constexpr int kMessagesPerPoll = 64; // enough to empty a burst, few enough to look at everything else soon

  struct Link {
    std::unique_ptr<Inbox> inbox; // the peer's
    std::deque<std::vector<char>> queue; // for which its ring has no space
    size_t unsent = 0; // bytes of these
    std::shared_ptr<const ForeignArena> arena;
  };
  void map_arena(int peer, const std::string& address);
  Link& link(int peer) {
    return links_[places_[peer]];
  }
  bool has_said(int peer, uint32_t what) const {
    return inbox_ && places_[peer] >= 0 && (inbox_->peer(places_[peer]).load(std::memory_order_acquire) & what) != 0;
  }
  bool write(Link& link, const void* first, size_t first_bytes, const void* second, size_t second_bytes);

  const int rank_;
  std::unique_ptr<Inbox> inbox_;
  Doorbell own_doorbell_ = {}; // if there is no inbox
  std::vector<int> places_; // by peer: among those of settle(), or -1
  std::vector<Link> links_; // by place
  std::vector<int> sources_; // peers that may write to the inbox: the first source_count_, which news() reads without the lock
  std::atomic<int> source_count_{0};
  std::atomic<size_t> queued_{0};
  bool attached_by_all_ = false;
};

} // namespace fog::shared_memory
