// MPI's own nonblocking reductions, for groups that were made with reduce="mpi".
//
// MPI goes on with them within each of its calls. Where it then sends to a process that has ended it may end this one too, as was measured
// (docs/architecture.md). So while one of them is not done, each call of MPI is preceded by a look at the processes that take part. Once one
// of them has ended MPI is not called any more in this process.
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

// All of a process. Every call needs the engine's lock.
class Reductions {
 public:
  struct Member {
    PeerId peer;
    std::string name; // for errors
  };

  // Who knows of processes that have ended.
  class Losses {
   public:
    virtual ~Losses() = default;
    // How many have, as far as can be known now; it costs next to nothing.
    virtual size_t ends() = 0;
    // Whether that one has, without a goodbye.
    virtual bool is_lost(PeerId peer) = 0;
  };

  Reductions(Runtime& runtime, Messages& messages, Watchdog& watchdog, Losses& losses);

  // Among some processes, by rank, all of which call it at about the same time: it returns when all have, with the lock kept. Groups that
  // are made at the same time have different `id`s. Throws DistBackendError if that is not done by `deadline`.
  std::shared_ptr<NetworkSums> among(std::vector<Member> members, uint64_t id, Deadline deadline);

  // Whether some have begun and are not done.
  bool in_flight() const {
    return !in_flight_.empty();
  }

 private:
  class OfGroup;
  class Pending;

  void begin(Pending& sum);
  void end(const Pending& sum);
  // Before a call of MPI: throws DistBackendError if one of those who take part has ended.
  void look_for_lost();

  Runtime& runtime_;
  Messages& messages_;
  Watchdog& watchdog_;
  Losses& losses_;
  std::unordered_map<OfGroup*, size_t> in_flight_; // how many, by group
};

} // namespace fog::mpi
