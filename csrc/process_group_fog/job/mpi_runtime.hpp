// MPI in this process: started once, shared by all groups, and finalized when the interpreter exits.
#pragma once

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

// The ranks of the first group are the process's world; later groups are subsets of it. MPI is started on all ranks of
// the world if a fabric between their hosts may do RMA, and otherwise not at all. The thread level is
// MPI_THREAD_SERIALIZED because every call of MPI holds the engine's lock. If another part of the program has started
// MPI, the level must be MPI_THREAD_MULTIPLE because that part does not hold the engine's lock.
class Runtime {
 public:
  // Never destroyed: MPI's threads and mappings must not outlive it.
  static Runtime& instance();

  // Throws the error of the first start of MPI, if it failed.
  void check_first_start() const;
  // Makes this process rank `rank` of the world `job`. `size`: the ranks with which that began, or the number above `rank` if
  // this process joins as a later one. `max_ranks`: the most ranks that it may have, 0 if it cannot grow.
  void join(std::string job, int rank, int size, int max_ranks);
  // Sets what the first group has found out. `nodes` is empty if not all ranks of the world have met.
  void settle(std::string host, std::vector<int> nodes);
  // Starts MPI on the ranks of `rendezvous`, which become the world, unless MPI runs already. If a launcher's world is
  // this group, MPI starts from the launcher, otherwise from a PMI server over the group's store. Returns why it does not
  // on some rank, the same on all ranks; empty if it does. Throws DistBackendError if a rank does not arrive within
  // `timeout`.
  std::string start(const std::shared_ptr<Rendezvous>& rendezvous, const std::string& job, std::chrono::milliseconds timeout);

  // Starts MPI from the launcher, without a store. Throws if there is no launcher.
  void start_from_launcher(std::chrono::milliseconds timeout);

  // Returns whether a launcher has created a world of `size` ranks with this process as rank `rank`. MPI must then
  // start from the launcher.
  static bool launched(int rank, int size);
  // Returns whether this process has a world.
  bool joined() const {
    return joined_;
  }
  // A name that no other world has; empty before there is a world. Ranks with equal names can reach each other.
  const std::string& job() const {
    return job_;
  }
  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  int max_ranks() const {
    return max_ranks_;
  }
  // A name that only the ranks of the world on this process's host have; empty before settle().
  const std::string& host() const {
    return host_;
  }
  // The node of each rank of the world, as MPI is told, numbered from 0 by first appearance; empty before settle().
  // With FOG_BETWEEN_HOSTS=rma a rank without local links is a node of its own; otherwise each host is a node.
  const std::vector<int>& nodes() const {
    return nodes_;
  }
  // fog's own communicator with all ranks of the world.
  MPI_Comm communicator() const {
    return communicator_;
  }

  // Returns rank 0's text on every rank of the world. Only for the bootstrap under a launcher. Throws DistBackendError
  // if the text has not arrived within `timeout`; MPI cannot be used any more then.
  std::string broadcast(const std::string& text, std::chrono::milliseconds timeout);

  // Records that the start of MPI has failed, and with it the group's. MPI cannot be started again.
  void fail(const std::string& reason);
  // MPI is not called any more; a call may not have returned.
  void stop() {
    started_ = false;
  }

  // Finalizes MPI if this is needed and safe. A launcher expects MPI_Finalize, which returns only if nothing in the
  // world has failed. Without a launcher there is nothing to finalize: fog's own PMI server is in this process, and
  // start() has removed the names of the shared segments.
  void finalize(bool healthy);

 private:
  Runtime() = default;
  // Describes the possible reasons why a call of MPI has not returned in time.
  using Excuse = std::function<std::string()>;
  // What is local of the start.
  void prepare(Deadline deadline, std::chrono::milliseconds timeout);
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
  int max_ranks_ = 0;
  std::vector<int> nodes_;
  MPI_Comm communicator_ = MPI_COMM_NULL;
  std::unique_ptr<PmiServer> pmi_;
#if MPI_VERSION >= 4
  MPI_Session session_ = MPI_SESSION_NULL; // from prepare() to initialize()
#endif
};

} // namespace fog
