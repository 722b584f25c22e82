// Memory of other processes that this one can write and read without their help.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace fog {

// A process of the job. It has the same number in all processes as long as it lives. Processes that started together
// are numbered by their ranks in the job; a process that joins later gets a new number.
using PeerId = int;

class OneSided {
 public:
  // Limit of bytes in one put or get, so that the engine's lock is free between two of them.
  static constexpr size_t kMostBytes = size_t(1) << 20;
  // Every process has a pool of memory that peers can access. An address is an offset into the pool.
  using Address = uint64_t;

  virtual ~OneSided() = default;

  // --- any thread ---
  // Allocates memory in this process's pool, aligned to cache lines, or to pages if it is at least as large as a page.
  // Returns nullptr if too little is free.
  virtual void* allocate(size_t bytes) = 0;
  virtual void free(void* memory) = 0;
  // Returns the address of these bytes for peers; nothing if they are not in the pool.
  virtual std::optional<Address> address_of(const void* memory, size_t bytes) const = 0;

  // --- with the engine's lock ---
  // Returns whether the peer is known to run, which the calls below require. If not, this soon becomes known.
  virtual bool may_reach(PeerId peer) = 0;

  // --- with the engine's lock; these throw Unreachable if the peer has ended, or DistBackendError for errors of the
  // library ---
  // Begins to write. `data` must not change before flush() has returned.
  virtual void put(PeerId peer, Address to, const void* data, size_t bytes) = 0;
  // Begins to read. `data` is not valid before flush() has returned.
  virtual void get(PeerId peer, Address from, void* data, size_t bytes) = 0;
  // Returns when all operations that were begun to this peer are complete, whatever the peer does meanwhile.
  virtual void flush(PeerId peer) = 0;
  // Writes a number, aligned to 8 bytes, and flushes. A peer that sees the number also sees all data flushed before.
  void notify(PeerId peer, Address to, uint64_t number) {
    put(peer, to, &number, sizeof(number));
    flush(peer);
  }
};

} // namespace fog
