// The memory that other processes of the host see of this one: a ring from each of them, its doorbell, its signs of
// life, chunks through which it streams data to them, and its withdrawn transfers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "core/copy.hpp"
#include "core/pulse.hpp"
#include "transport/doorbell.hpp"

namespace fog::shared_memory {

// A queue of records from one process to another, in memory that both have mapped.
//
// It has one writer and one reader, and no locks. All zeros is an empty ring. The counters of the two sides are on
// separate cache lines.
struct Ring {
  static constexpr size_t kCapacity = size_t(256) << 10;

  alignas(64) std::atomic<uint64_t> written; // bytes so far
  alignas(64) std::atomic<uint64_t> read; // bytes so far
  std::atomic<uint32_t> writer_waits; // for space: the reader rings the writer's doorbell after it has made some
  alignas(64) char data[kCapacity];

  bool empty() const {
    return written.load(std::memory_order_acquire) == read.load(std::memory_order_relaxed);
  }

  // Returns whether there has ever been a record.
  bool used() const {
    return written.load(std::memory_order_relaxed) > 0;
  }

  // Appends one record that consists of two parts. Returns false if there is no space. Only for the writer.
  bool write(const void* first, size_t first_bytes, const void* second, size_t second_bytes) {
    const size_t length = first_bytes + second_bytes;
    const size_t needed = aligned(sizeof(uint64_t) + length);
    uint64_t end = written.load(std::memory_order_relaxed);
    size_t position = end % kCapacity;
    const size_t rest = kCapacity - position;
    const size_t skipped = needed > rest ? rest : 0; // records do not wrap around
    if (end + skipped + needed - read.load(std::memory_order_acquire) > kCapacity) {
      return false;
    }
    if (skipped > 0) {
      store_length(position, kSkip);
      end += skipped;
      position = 0;
    }
    store_length(position, length);
    std::memcpy(data + position + sizeof(uint64_t), first, first_bytes);
    copy_bytes(data + position + sizeof(uint64_t) + first_bytes, second, second_bytes);
    written.store(end + needed, std::memory_order_release);
    return true;
  }

  // Passes the oldest record to `take(const char*, size_t)` and removes it, even if take() throws. Returns false if
  // there is none. Only for the reader. If the data is not a valid record, everything in the ring is removed, and
  // take() gets 0 bytes.
  template <typename Take>
  bool take_one(Take&& take) {
    uint64_t begin = read.load(std::memory_order_relaxed);
    const uint64_t end = written.load(std::memory_order_acquire);
    if (begin == end) {
      return false;
    }
    size_t position = begin % kCapacity;
    uint64_t length = load_length(position);
    if (length == kSkip) {
      begin += kCapacity - position;
      position = 0;
      length = load_length(position);
    }
    struct Remove {
      std::atomic<uint64_t>& counter;
      uint64_t value;
      ~Remove() {
        counter.store(value, std::memory_order_release);
      }
    };
    const size_t space = kCapacity - position - sizeof(uint64_t);
    const bool whole = length <= space && aligned(sizeof(uint64_t) + length) <= end - begin;
    const Remove remove{read, whole ? begin + aligned(sizeof(uint64_t) + length) : end};
    take(data + position + sizeof(uint64_t), whole ? static_cast<size_t>(length) : 0);
    return true;
  }

 private:
  static constexpr uint64_t kSkip = ~uint64_t(0); // the next record is at the start of the ring

  static size_t aligned(size_t bytes) {
    return (bytes + 7) & ~size_t(7);
  }
  void store_length(size_t position, uint64_t length) {
    std::memcpy(data + position, &length, sizeof(length));
  }
  uint64_t load_length(size_t position) const {
    uint64_t length = 0;
    std::memcpy(&length, data + position, sizeof(length));
    return length;
  }
};

// An anonymous file (memfd) that its owner and the peers that write to it have mapped. It has no name in any file
// system, so nothing is left behind however the processes end, and the size of /dev/shm does not matter. Pages take
// memory only after their first use.
class Inbox {
 public:
  // A chunk is large enough that two ranks which share a core do not alternate too often, and small enough to stay in
  // the cache. Most chunks are address space only, see Streams.
  static constexpr size_t kChunkBytes = size_t(256) << 10;
  static constexpr uint32_t kChunks = 1024;
  // Number of withdrawn transfers that are recorded.
  static constexpr uint32_t kWithdrawn = 8192;

  // Flags that a peer has set about itself.
  enum Peer : uint32_t {
    kAttached = 1, // it has mapped this inbox and sends all its messages here
    kMaps = 2, // it has mapped the owner's arena
    kLost = 4, // it counts the owner as lost, and may reuse the memory that it shares with the owner for reading
  };

  // Returns the size of an inbox for messages from `ranks` ranks.
  static size_t bytes_for(int ranks);
  // Creates an inbox, which cannot be written to before open(); nullptr if the system has no memfd.
  static std::unique_ptr<Inbox> create();
  // Prepares it for messages from `ranks` ranks, each with its own ring. Returns false if there is no memory.
  bool open(int ranks);
  // Maps the inbox that a process of this host has published as `address`, open or not. Returns nullptr if that fails,
  // or if it is not for `ranks` ranks.
  static std::unique_ptr<Inbox> attach(const std::string& address, int ranks);
  ~Inbox();
  Inbox(const Inbox&) = delete;
  Inbox& operator=(const Inbox&) = delete;

  // The argument for attach() in another process.
  const std::string& address() const {
    return address_;
  }

  // depart() announces that the owner ends in good order; departed() returns whether it has.
  void depart() const {
    shared_->departed.store(1);
  }
  bool departed() const {
    return shared_->departed.load() != 0;
  }

  Pulse& pulse() const {
    return shared_->pulse;
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
  // Empties the ring of a writer whose process has ended, for another process in its place.
  void renew(int writer) const;
  // Draws the attention of the process that has published its inbox as `address`, see Pulse::announced. Returns false if
  // there is no such process any more.
  static bool announce(const std::string& address);
  // Memory that the owner fills and peers empty.
  char* chunk(uint32_t index) const {
    return reinterpret_cast<char*>(shared_) + bytes_ - (kChunks - index) * kChunkBytes;
  }
  // Gives a chunk's pages back to the system.
  void drop(uint32_t chunk) const;

  // --- transfers that the owner has withdrawn: data that peers then read of them is not valid ---
  void withdraw(uint64_t transfer) const;
  uint32_t withdrawals() const {
    return shared_->withdrawals.load(std::memory_order_relaxed);
  }
  // For a peer that has read data of a transfer which began after `withdrawals` withdrawals: returns whether it was not
  // withdrawn before the data was read.
  bool stands(uint64_t transfer, uint32_t withdrawals) const;

 private:
  struct Shared {
    uint64_t token; // distinguishes this inbox from another file with the same number
    std::atomic<uint32_t> departed; // set if the owner ends in good order
    Doorbell doorbell;
    Pulse pulse;
    alignas(64) std::atomic<uint32_t> withdrawals;
    std::atomic<uint64_t> withdrawn[kWithdrawn]; // the last ones; number k is at k % kWithdrawn
  };
  struct Slot {
    std::atomic<uint32_t> peer;
    Ring ring;
  };

  Inbox(int fd, std::string address);
  // Returns the inbox that a process has published as `address`, not mapped; nullptr if it is not there.
  static std::unique_ptr<Inbox> find(const std::string& address);
  Slot* slots() const;

  const int fd_;
  Shared* shared_ = nullptr;
  size_t bytes_ = 0;
  const std::string address_;
};

} // namespace fog::shared_memory
