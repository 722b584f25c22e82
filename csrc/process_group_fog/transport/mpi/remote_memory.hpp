// MPI RMA: one window of MPI over a pool of memory in each process of the job.
//
// MPICH makes a communicator for each window, and has some 2,000 of them, so there is one for all groups; who owns which part of a pool is
// its process's own business, so nothing that changes later is collective. Only puts and gets with a flush are used: with those a fabric
// that moves data by itself is done while the target sleeps, and nothing is pending towards a process that dies. Atomics, accumulates and
// windows of dynamic memory are active messages in MPICH, which wait for the target.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "core/deadline.hpp"
#include "job/between_hosts.hpp"
#include "job/mpi_api.hpp"
#include "job/mpi_runtime.hpp"
#include "job/mpi_watchdog.hpp"
#include "job/rendezvous.hpp"
#include "transport/one_sided.hpp"

namespace fog::mpi {

class RemoteMemory final : public OneSided {
 public:
  // All ranks of the world call it as they start, before any of them calls MPI for something else. Null where data goes by messages: that was
  // asked for, or there is one node only, or kAuto has found that a put here waits for its target. Throws DistBackendError on all ranks if
  // kRma was asked for and that is so, or if the window is not made within `timeout`.
  static std::unique_ptr<RemoteMemory> open(
      Runtime& runtime, Rendezvous& rendezvous, Watchdog& watchdog, std::chrono::milliseconds timeout);

  RemoteMemory(const RemoteMemory&) = delete;
  RemoteMemory& operator=(const RemoteMemory&) = delete;

  // Who knows whether a process has ended: it is asked before each flush, as that would crash this process (UCX over shared memory) or
  // never return. And whether it is known that one is there.
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

  // Whether that peer is on another node. Between ranks of one node MPI has other ways, which the probe has not tried.
  bool reaches(PeerId peer) const {
    const auto& nodes = runtime_.nodes();
    return nodes[static_cast<size_t>(peer)] != nodes[static_cast<size_t>(runtime_.rank())];
  }
  size_t bytes() const {
    return bytes_;
  }
  // How much of the pool is free; for any thread.
  size_t free_bytes() const;

 private:
  RemoteMemory(Runtime& runtime, Watchdog& watchdog, char* memory, size_t bytes);

  // Why MPI makes no window, if that is so.
  std::optional<std::string> create(std::chrono::milliseconds timeout);
  // Whether there are windows, and a put is there before its target calls MPI again; else why not. All ranks call it.
  std::optional<std::string> probe(
      Rendezvous& rendezvous, const std::optional<std::string>& no_window, std::chrono::milliseconds timeout);
  // Rank 0's part of it, which has the result, and that of the target.
  std::string probe_as_origin(Rendezvous& rendezvous, int target, std::chrono::milliseconds timeout);
  void probe_as_target(Rendezvous& rendezvous, Deadline deadline);
  void check_reachable(PeerId peer) const;
  int mpi_rank(PeerId peer) const {
    return peer; // as in Messages
  }

  Watchdog& watchdog_;
  Runtime& runtime_;
  char* const memory_;
  const size_t bytes_;
  MPI_Win window_ = MPI_WIN_NULL;
  std::function<bool(PeerId peer)> has_ended_;
  std::function<bool(PeerId peer)> may_reach_;

  mutable std::mutex mutex_; // of what follows
  std::map<size_t, size_t> free_; // stretches of the pool: offset and size, no two side by side
  std::unordered_map<size_t, size_t> sizes_; // of what was given out, by offset
  size_t free_bytes_;
};

} // namespace fog::mpi
