// What other processes of the host see of this one: a ring from each of them, its doorbell, its offers, and windows through
// which it streams data to them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/shared_memory/doorbell.hpp"
#include "transport/shared_memory/ring.hpp"

namespace fog::shared_memory {

// An anonymous file (memfd) mapped by its owner and by the peers that write to it. It has no name in any file system, so
// nothing is left behind however the processes end, and the size of /dev/shm does not matter. Pages take memory only once
// they were used.
class Inbox {
 public:
  static constexpr uint32_t kOffers = 1024;
  static constexpr uint32_t kWindows = 32;
  // Large enough that two ranks which share a core do not change places too often, small enough to stay in the cache.
  static constexpr size_t kWindowBytes = size_t(1) << 20;

  // What a peer has said about itself.
  enum Peer : uint32_t {
    kAttached = 1, // it has mapped this inbox: all its messages come here
    kReads = 2, // it can read the owner's memory
    kMaps = 4, // it has mapped the owner's arena
  };

  // How large an inbox for messages from `ranks` ranks is.
  static size_t bytes_for(int ranks);
  // An inbox for messages from `ranks` ranks; nullptr where the system has no memfd or no memory.
  static std::unique_ptr<Inbox> create(int ranks);
  // The inbox that a process of this host has published as `address`; nullptr if it cannot be mapped, or is not for `ranks` ranks.
  static std::unique_ptr<Inbox> attach(const std::string& address, int ranks);
  ~Inbox();
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;

  // For attach(), in another process.
  const std::string& address() const {
    return address_;
  }

  Doorbell& doorbell() const {
    return shared_->doorbell;
  }
  Ring& ring(int writer) const {
    return slots()[writer].ring;
  }
  std::atomic<uint32_t>& peer(int writer) const {
    return slots()[writer].peer;
  }
  // Which message's data a peer may read through an offer; 0 once it may not any more.
  std::atomic<uint64_t>& offer(uint32_t index) const {
    return shared_->offers[index];
  }
  // Memory that the owner fills and peers empty.
  char* window(uint32_t index) const {
    return reinterpret_cast<char*>(shared_) + bytes_ - (kWindows - index) * kWindowBytes;
  }
  // Whether this process can read the memory of the inbox's owner: tries it.
  bool owner_is_readable() const;

 private:
  struct Shared {
    uint64_t token; // tells this inbox from another file of the same number
    Doorbell doorbell;
    alignas(64) std::atomic<uint64_t> offers[kOffers];
  };
  struct Slot {
    std::atomic<uint32_t> peer;
    Ring ring;
  };

  Inbox(int fd, void* memory, size_t bytes, std::string address, int owner, uintptr_t owners_view);
  Slot* slots() const;

  const int fd_;
  Shared* const shared_;
  const size_t bytes_;
  const std::string address_;
  const int owner_; // process id
  const uintptr_t owners_view_; // where the owner has it mapped
};

} // namespace fog::shared_memory
