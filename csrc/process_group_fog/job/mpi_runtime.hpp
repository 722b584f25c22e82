// MPI in this process: started once, shared by every group, ended at interpreter exit.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/deadline.hpp"
#include "job/mpi_api.hpp"
#include "job/pmi_server.hpp"
#include "job/rendezvous.hpp"

namespace fog {

// Rank and size that a launcher (mpiexec, srun) put into the environment; size 0 without one.
struct LauncherWorld {
  int rank = 0;
  int size = 0;
};
LauncherWorld launcher_world();

// The ranks of the first group are the process's world; later groups are subsets of it. MPI is started on all of them where it is needed:
// ranks that share one host and its memory do without. The thread
// level is MPI_THREAD_SERIALIZED: whoever calls MPI holds the engine's lock. Where somebody else has started MPI it must be
// MPI_THREAD_MULTIPLE, since he holds other locks.
class Runtime {
 public:
  // Lives until the process ends: MPI's threads and mappings must not outlive it.
  static Runtime& instance();

  // Throws what the first start of MPI has failed with, if it has.
  void check_first_start() const;
  // From now on this process is rank `rank` of a world of that name.
  void join(std::string job, int rank, int size);
  // What ranks have found, see meet_on_hosts(); `nodes` is empty where not all of the world have met.
  void settle(std::string host, int local_ranks, std::vector<int> nodes);
  // Starts MPI on the ranks of `rendezvous`, which are to be the world, unless it runs already. Under a launcher whose world is this group,
  // MPI starts from the launcher; else from a PMI server over its store. Throws DistBackendError when a rank does not come within
  // `timeout` or MPI fails.
  void start(const std::shared_ptr<Rendezvous>& rendezvous, const std::string& job, std::chrono::milliseconds timeout);

  // Starts MPI from the launcher, without a store. Throws when there is no launcher.
  void start_from_launcher(std::chrono::milliseconds timeout);

  bool started() const {
    return started_;
  }
  // Whether a launcher has made the world of so many ranks, this one being that rank, and is to be told of MPI's start.
  static bool launched(int rank, int size);
  // Whether this process has a world.
  bool joined() const {
    return joined_;
  }
  // A name that no other world shares, empty before there is one; ranks with equal names can reach each other.
  const std::string& job() const {
    return job_;
  }
  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  // A name of this process's host that its other ranks of the world have as well, and nobody else; empty until settle().
  const std::string& host() const {
    return host_;
  }
  // How many ranks of the world share this process's host, itself among them; 0 until settle().
  int local_ranks() const {
    return local_ranks_;
  }
  // Of each rank of the world the node that MPI takes it for, numbered from 0 on by first appearance; empty until settle(). With
  // FOG_BETWEEN_HOSTS=rma a rank without local links is a node of its own; else hosts are nodes.
  const std::vector<int>& nodes() const {
    return nodes_;
  }
  // fog's own communicator over all ranks of the world.
  MPI_Comm communicator() const {
    return communicator_;
  }
  int max_tag() const {
    return max_tag_;
  }

  // Rank 0's text on every rank of the world. For the bootstrap under a launcher only. Throws DistBackendError if it has not
  // come within `timeout`; then MPI cannot be used any more.
  std::string broadcast(const std::string& text, std::chrono::milliseconds timeout);

  // A call of MPI that all ranks make at their start has not returned, and still holds MPI: it is not started any more.
  void fail(const std::string& reason);

  // Ends MPI where that is needed and safe: a launcher expects MPI_Finalize, and only a world in which nothing failed
  // comes back from it. Without a launcher nothing is left to end, since fog's own PMI server is in this process and the
  // names of shared segments are gone since start().
  void finalize(bool healthy);

 private:
  Runtime() = default;
  // What a call of MPI that has not returned in time may be waiting for.
  using Excuse = std::function<std::string()>;
  void initialize(Deadline deadline, std::chrono::milliseconds timeout);
  void adopt_world(Deadline deadline, std::chrono::milliseconds timeout, const Excuse& excuse);
  std::string broadcast_in_time(const std::string& text, Deadline deadline, std::chrono::milliseconds timeout);

  std::mutex mutex_;
  bool joined_ = false;
  bool started_ = false;
  bool finalized_ = false;
  bool launched_ = false; // by mpiexec or srun
  bool initialized_here_ = false;
  std::string failure_;
  std::string job_;
  std::string host_; // empty until all ranks of the world have met
  int rank_ = 0;
  int size_ = 0;
  int max_tag_ = 0;
  std::atomic<int> local_ranks_{0};
  std::vector<int> nodes_;
  MPI_Comm communicator_ = MPI_COMM_NULL;
  std::unique_ptr<PmiServer> pmi_;
};

} // namespace fog
