// MPI's own nonblocking reductions, for groups that were created with reduce="mpi".
//
// MPI makes progress on them within each of its calls. If it then sends to a process that has ended, it may end this
// process too (docs/architecture.md has measurements). So while a reduction is in flight, each call of MPI is preceded
// by a check of the processes that take part. Once one of them has ended, this process does not call MPI any more.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/deadline.hpp"
#include "job/mpi_api.hpp"
#include "job/mpi_runtime.hpp"
#include "job/mpi_watchdog.hpp"
#include "transport/mpi/messages.hpp"
#include "transport/network_sums.hpp"

namespace fog::mpi {

// All reductions of a process. Every call needs the engine's lock.
class Reductions {
 public:
  struct Member {
    PeerId peer;
    std::string name; // for errors
  };

  // Knows which processes have ended.
  class Losses {
   public:
    virtual ~Losses() = default;
    // Returns the number of processes that are known to have ended, at almost no cost.
    virtual size_t ends() = 0;
    // Returns whether that process has ended without a goodbye.
    virtual bool is_lost(PeerId peer) = 0;
  };

  Reductions(Runtime& runtime, Messages& messages, Watchdog& watchdog, Losses& losses);

  // Creates a communicator of these processes, by rank. All of them call it at about the same time; it returns when all
  // have called it, and keeps the lock. Groups that are created at the same time have different `id`s. Throws
  // DistBackendError if this is not done by `deadline`.
  std::shared_ptr<NetworkSums> among(std::vector<Member> members, uint64_t id, Deadline deadline);

  // Returns whether reductions have begun and are not done.
  bool in_flight() const {
    return !in_flight_.empty();
  }

 private:
  class OfGroup;
  class Pending;

  void begin(Pending& sum);
  void end(const Pending& sum);
  // Called before each call of MPI. Throws DistBackendError if a process that takes part has ended.
  void look_for_lost();

  Runtime& runtime_;
  Messages& messages_;
  Watchdog& watchdog_;
  Losses& losses_;
  std::unordered_map<OfGroup*, size_t> in_flight_; // number of sums, by group
};

} // namespace fog::mpi
