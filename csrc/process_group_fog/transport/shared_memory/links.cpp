#include "transport/shared_memory/links.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "core/copy.hpp"

namespace fog::shared_memory {
namespace {

// Separates the arena's part of an address.
constexpr char kArenaMark = '/';

} // namespace

Links::Links(int rank, int size, int max_ranks, bool on)
    : rank_(rank), max_ranks_(std::max(size, max_ranks)), inbox_(on ? Inbox::create() : nullptr) {}

void Links::settle(int ranks) {
  links_ = std::vector<Link>(static_cast<size_t>(ranks));
  sources_.resize(links_.size());
  if (inbox_ && !inbox_->open(ranks)) {
    inbox_ = nullptr;
  }
}

void Links::attach(int peer, const std::string& address) {
  if (!inbox_ || peer == rank_ || !has_place(peer) || address.empty()) {
    return;
  }
  if (reaches(peer)) {
    map_arena(peer, address);
    return;
  }
  const int count = source_count_.load();
  if (std::find(sources_.begin(), sources_.begin() + count, peer) == sources_.begin() + count) {
    sources_[count] = peer; // it may reach this process even if this one cannot reach it
    source_count_.store(count + 1);
  }
  if (auto inbox = Inbox::attach(address, static_cast<int>(links_.size()))) {
    inbox->peer(rank_).fetch_or(Inbox::kAttached);
    links_[peer].inbox = std::move(inbox);
    map_arena(peer, address);
  }
}

void Links::map_arena(int peer, const std::string& address) {
  std::istringstream fields(address.substr(address.find(kArenaMark) + 1));
  int pid = 0;
  int fd = -1;
  uint32_t token = 0;
  auto& link = links_[peer];
  if (link.arena || !(fields >> pid >> fd >> token)) {
    return;
  }
  link.arena = ForeignArena::map(pid, fd, token);
  if (link.arena) {
    link.inbox->peer(rank_).fetch_or(Inbox::kMaps);
  }
}

void Links::renew(int peer) {
  forget(peer);
  if (inbox_ && has_place(peer)) {
    links_[peer].inbox = nullptr;
    inbox_->renew(peer);
  }
}

void Links::detach(int peer) {
  if (!reaches(peer)) {
    return;
  }
  links_[peer].inbox->peer(rank_).store(0);
  forget(peer);
  links_[peer].inbox = nullptr;
  const auto last = std::remove(sources_.begin(), sources_.begin() + source_count_.load(), peer);
  source_count_.store(static_cast<int>(last - sources_.begin()));
}

std::string Links::address(bool with_arena) const {
  if (!inbox_) {
    return {};
  }
  const auto* arena = with_arena ? Arena::instance() : nullptr;
  return inbox_->address() + kArenaMark +
      (arena != nullptr ? std::to_string(getpid()) + ' ' + std::to_string(arena->fd()) + ' ' + std::to_string(arena->token()) : "");
}

bool Links::mapped_by(int peer, const void* data, size_t bytes) const {
  const auto* arena = Arena::instance();
  return arena != nullptr && maps_arena(peer) && arena->contains(data, bytes);
}

bool Links::write(Link& link, const void* first, size_t first_bytes, const void* second, size_t second_bytes, bool loud) {
  auto& ring = link.inbox->ring(rank_);
  if (ring.write(first, first_bytes, second, second_bytes)) {
    if (loud) {
      link.inbox->doorbell().ring();
    }
    return true;
  }
  ring.writer_waits.store(1, std::memory_order_relaxed);
  // Pairs with the fence in poll(). Then try again: the reader may have made space before it could see this.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (ring.write(first, first_bytes, second, second_bytes)) {
    link.inbox->doorbell().ring();
    return true;
  }
  return false;
}

void Links::send(int peer, const Header& header, const void* data, size_t bytes) {
  auto& link = links_[peer];
  // A peer without operations does not need to wake up for the news of an end, and a peer that waits polls from time to
  // time.
  const bool loud = header.kind != MessageKind::kGoodbye && header.kind != MessageKind::kClosed;
  if (link.queue.empty() && write(link, &header, sizeof(header), data, bytes, loud)) {
    if (auto& bell = link.inbox->doorbell(); header.kind == MessageKind::kMembership && bell.listening.load() == 0) {
      bell.wake(Doorbell::kBackground); // without operations the peer does not listen
    }
    return;
  }
  std::vector<char> record(sizeof(header) + bytes);
  std::memcpy(record.data(), &header, sizeof(header));
  copy_bytes(record.data() + sizeof(header), data, bytes);
  if (link.queue.empty()) {
    // The peer may be asleep without operations of its own, but must make space in the ring.
    link.inbox->doorbell().wake(Doorbell::kBackground);
  }
  link.unsent += record.size();
  link.queue.push_back(std::move(record));
  ++queued_;
}

bool Links::flush() {
  if (queued_ == 0) {
    return false;
  }
  const size_t before = queued_;
  for (auto& link : links_) {
    while (!link.queue.empty() && write(link, link.queue.front().data(), link.queue.front().size(), nullptr, 0, true)) {
      link.unsent -= link.queue.front().size();
      link.queue.pop_front();
      --queued_;
    }
  }
  return queued_ < before;
}

void Links::expel(int peer) {
  if (reaches(peer)) {
    auto& inbox = *links_[peer].inbox;
    inbox.peer(rank_).fetch_or(Inbox::kLost);
    inbox.pulse().lost_by.fetch_add(1);
    std::atomic_thread_fence(std::memory_order_seq_cst); // before memory is reused that it reads; see stands()
  }
}

std::vector<int> Links::expelled_by() {
  std::vector<int> peers;
  if (!inbox_ || inbox_->pulse().lost_by.load(std::memory_order_acquire) == expelled_by_.size()) {
    return peers;
  }
  for (int index = 0; index < source_count_.load(); ++index) {
    const int peer = sources_[index];
    if (has_said(peer, Inbox::kLost) && std::find(expelled_by_.begin(), expelled_by_.end(), peer) == expelled_by_.end()) {
      expelled_by_.push_back(peer);
      peers.push_back(peer);
    }
  }
  return peers;
}

void Links::forget(int peer) {
  if (!has_place(peer)) {
    return;
  }
  auto& link = links_[peer];
  queued_ -= link.queue.size();
  link.queue.clear();
  link.unsent = 0;
  link.arena = nullptr; // its memory is freed when the last mapping is gone
}

bool Links::news() const {
  const int count = source_count_.load();
  for (int index = 0; index < count; ++index) {
    if (!inbox_->ring(sources_[index]).empty()) {
      return true;
    }
  }
  return false;
}

} // namespace fog::shared_memory
