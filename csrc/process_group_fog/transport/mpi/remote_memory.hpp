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
#include "transport/one_sided.hpp"

namespace fog::mpi {

class RemoteMemory final : public OneSided {
 public:
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

  void* allocate(size_t bytes) override;
  void free(void* memory) override;
  std::optional<Address> address_of(const void* memory, size_t bytes) const override;
  bool may_reach(PeerId peer) override {
    return may_reach_(peer);
  }
  void put(PeerId peer, Address to, const void* data, size_t bytes) override;
  void get(PeerId peer, Address from, void* data, size_t bytes) override;
  void flush(PeerId peer) override;

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
  // Returns how much of the pool is free. Any thread may call it.
  size_t free_bytes() const;

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
