// Memory of other processes that this one writes to and reads while they take no part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace fog {

// A process of the job, the same number in all of them for as long as it lives. Those that started together have the numbers of their
// ranks in the job; who joins later gets one that nobody has had.
using PeerId = int;

class OneSided {
 public:
  // A put or a get has at most so many bytes, so that the engine's lock is free between two of them.
  static constexpr size_t kMostBytes = size_t(1) << 20;
  // Every process has a pool of memory that peers reach; an address is a number of bytes from its beginning on.
  using Address = uint64_t;

  virtual ~OneSided() = default;

  // --- for any thread ---
  // Memory in this process's pool, aligned to cache lines, or to pages if it is as large as one; nullptr if too little is left.
  virtual void* allocate(size_t bytes) = 0;
  virtual void free(void* memory) = 0;
  // Where peers find these bytes; nothing if they are not in the pool.
  virtual std::optional<Address> address_of(const void* memory, size_t bytes) const = 0;

  // --- with the engine's lock ---
  // Whether it is known that the peer is there, which has to be so before any of what follows. Else it soon is.
  virtual bool may_reach(PeerId peer) = 0;

  // --- the same; they throw Unreachable if the peer has ended, or DistBackendError for what the library reports ---
  // Begins to write. `data` must not change before flush() has returned.
  virtual void put(PeerId peer, Address to, const void* data, size_t bytes) = 0;
  // Begins to read. Nothing is there before flush() has returned.
  virtual void get(PeerId peer, Address from, void* data, size_t bytes) = 0;
  // Returns when all that began towards this peer is there, whatever the peer does meanwhile.
  virtual void flush(PeerId peer) = 0;
  // Writes a number, aligned to 8 bytes, and flushes: who sees it there sees all that was flushed before.
  void notify(PeerId peer, Address to, uint64_t number) {
    put(peer, to, &number, sizeof(number));
    flush(peer);
  }
};

} // namespace fog
