// A queue of records from one process to another, in memory that both have mapped.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/copy.hpp"

namespace fog::shared_memory {

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

} // namespace fog::shared_memory
