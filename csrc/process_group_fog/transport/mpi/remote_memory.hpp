// MPI RMA: one MPI window over a pool of memory in each process of the job.
//
// MPICH creates a communicator for each window, and supports some 2,000 of them, so all groups share one window. Each
// process manages its own pool, so later changes need no collective call. Only puts and gets with a flush are used:
// with them a fabric that moves data by itself completes while the target sleeps, and nothing stays pending towards a
// process that dies. Atomics, accumulates and windows of dynamic memory are active messages in MPICH and wait for the
// target.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "job/mpi_api.hpp"
#include "job/mpi_runtime.hpp"
#include "job/mpi_watchdog.hpp"
#include "job/rendezvous.hpp"
#include "core/peer.hpp"

namespace fog::mpi {

class RemoteMemory {
 public:
  // Limit of bytes in one put or get, so that the engine's lock is free between two of them.
  static constexpr size_t kMostBytes = size_t(1) << 20;
  // An offset into a process's pool.
  using Address = uint64_t;

  // All ranks of the world call this at their start, before any other use of MPI. Returns null if all data goes by TCP:
  // there is only one node, or the probe under kAuto has found that RMA is not possible or does not pay. Throws
  // DistBackendError on all ranks if kRma was asked for and is not possible.
  static std::unique_ptr<RemoteMemory> open(
      Runtime& runtime, Rendezvous& rendezvous, Watchdog& watchdog, std::chrono::milliseconds timeout);

  RemoteMemory(const RemoteMemory&) = delete;
  RemoteMemory& operator=(const RemoteMemory&) = delete;

  // Sets two functions. `has_ended` is called before each flush, because a flush to a process that has ended would
  // crash this process (UCX over shared memory) or never return. `may_reach` tells whether a process is known to run.
  void ask(std::function<bool(PeerId peer)> has_ended, std::function<bool(PeerId peer)> may_reach) {
    has_ended_ = std::move(has_ended);
    may_reach_ = std::move(may_reach);
  }

  // --- any thread ---
  // Allocates memory in this process's pool, aligned to cache lines, or to pages if it is at least as large as a page.
  // Returns nullptr if too little is free.
  void* allocate(size_t bytes);
  void free(void* memory);
  // Returns the address of these bytes for peers; nothing if they are not in the pool.
  std::optional<Address> address_of(const void* memory, size_t bytes) const;
  // Returns how much of the pool is free.
  size_t free_bytes() const;

  // --- with the engine's lock ---
  // Returns whether the peer is known to run, which the calls below require. If not, this soon becomes known.
  bool may_reach(PeerId peer) {
    return may_reach_(peer);
  }

  // --- with the engine's lock; these throw Unreachable if the peer has ended, or DistBackendError for errors of MPI ---
  // Begins to write. `data` must not change before flush() has returned.
  void put(PeerId peer, Address to, const void* data, size_t bytes);
  // Begins to read. `data` is not valid before flush() has returned.
  void get(PeerId peer, Address from, void* data, size_t bytes);
  // Returns when all operations that were begun to this peer are complete, whatever the peer does meanwhile.
  void flush(PeerId peer);
  // Writes a number, aligned to 8 bytes, and flushes. A peer that sees the number also sees all data flushed before.
  void notify(PeerId peer, Address to, uint64_t number) {
    put(peer, to, &number, sizeof(number));
    flush(peer);
  }

  // Returns whether that peer is on another node. Between ranks of one node MPI works differently, which the probe has
  // not tested.
  bool reaches(PeerId peer) const {
    const auto& nodes = runtime_.nodes();
    return static_cast<size_t>(peer) < nodes.size() && outside_.count(peer) == 0 &&
        nodes[static_cast<size_t>(peer)] != nodes[static_cast<size_t>(runtime_.rank())];
  }
  // Another process, which is not in MPI's world, has that number from now on.
  void leave(PeerId peer) {
    outside_.insert(peer);
  }
  // Calls MPI, which may have to answer other processes: some fabrics connect two processes at the first put between them.
  void answer();
  // Returns whether a put completes while its target is outside of MPI. Otherwise it waits until the target calls answer().
  bool completes_alone() const {
    return completes_alone_;
  }
  // Returns whether a call of MPI has not returned, so that no other call can follow.
  bool broken() const {
    return watchdog_.broken();
  }
  size_t bytes() const {
    return bytes_;
  }

 private:
  RemoteMemory(Runtime& runtime, Watchdog& watchdog, char* memory, size_t bytes);

  // Throws DistBackendError if MPI cannot create a window.
  void create(std::chrono::milliseconds timeout);
  void check_reachable(PeerId peer) const;
  int mpi_rank(PeerId peer) const {
    return peer; // processes that have not started as MPI's world are not reached
  }

  Watchdog& watchdog_;
  Runtime& runtime_;
  char* const memory_;
  const size_t bytes_;
  MPI_Win window_ = MPI_WIN_NULL;
  bool completes_alone_ = false;
  std::function<bool(PeerId peer)> has_ended_;
  std::function<bool(PeerId peer)> may_reach_;
  std::unordered_set<PeerId> outside_; // see leave()

  mutable std::mutex mutex_; // guards the members below
  std::map<size_t, size_t> free_; // free parts of the pool, offset to size; adjacent parts are merged
  std::unordered_map<size_t, size_t> sizes_; // sizes of allocated parts, by offset
  size_t free_bytes_;
};

} // namespace fog::mpi
