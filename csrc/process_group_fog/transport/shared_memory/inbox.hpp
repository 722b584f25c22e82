// What other processes of the host see of this one: a ring from each of them, its doorbell, chunks through which it streams data to
// them, and which transfers it has withdrawn.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/doorbell.hpp"
#include "transport/shared_memory/ring.hpp"

namespace fog::shared_memory {

// An anonymous file (memfd) mapped by its owner and by the peers that write to it. It has no name in any file system, so
// nothing is left behind however the processes end, and the size of /dev/shm does not matter. Pages take memory only once
// they were used.
class Inbox {
 public:
  // Each large enough that two ranks which share a core do not change places too often, small enough to stay in the cache. Most are
  // addresses only, see Streams.
  static constexpr size_t kChunkBytes = size_t(256) << 10;
  static constexpr uint32_t kChunks = 1024;
  // How many withdrawn transfers are remembered.
  static constexpr uint32_t kWithdrawn = 8192;

  // What a peer has said about itself.
  enum Peer : uint32_t {
    kAttached = 1, // it has mapped this inbox: all its messages come here
    kMaps = 2, // it has mapped the owner's arena
  };

  // How large an inbox for messages from `ranks` ranks is.
  static size_t bytes_for(int ranks);
  // An inbox, which nobody can write to before open(); nullptr where the system has no memfd.
  static std::unique_ptr<Inbox> create();
  // It is for messages from `ranks` ranks, each with a ring of its own. False if there is no memory.
  bool open(int ranks);
  // The inbox that a process of this host has published as `address`, be it open or not; nullptr if it cannot be mapped, or is not for
  // `ranks` ranks.
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
  // Memory that the owner fills and peers empty.
  char* chunk(uint32_t index) const {
    return reinterpret_cast<char*>(shared_) + bytes_ - (kChunks - index) * kChunkBytes;
  }
  // Gives a chunk's pages back to the system.
  void drop(uint32_t chunk) const;

  // --- transfers that the owner has withdrawn: what peers read of them may be anything ---
  void withdraw(uint64_t transfer) const;
  uint32_t withdrawals() const {
    return shared_->withdrawals.load(std::memory_order_relaxed);
  }
  // For a peer, after it has read data of a transfer that began after so many withdrawals: whether it had not been withdrawn by then.
  bool stands(uint64_t transfer, uint32_t withdrawals) const;

 private:
  struct Shared {
    uint64_t token; // tells this inbox from another file of the same number
    Doorbell doorbell;
    alignas(64) std::atomic<uint32_t> withdrawals;
    std::atomic<uint64_t> withdrawn[kWithdrawn]; // the last ones, number k at place k % kWithdrawn
  };
  struct Slot {
    std::atomic<uint32_t> peer;
    Ring ring;
  };

  Inbox(int fd, std::string address);
  Slot* slots() const;

  const int fd_;
  Shared* shared_ = nullptr;
  size_t bytes_ = 0;
  const std::string address_;
};

} // namespace fog::shared_memory
