// A PMI-1 server for one process, based on the group's Store.
//
// Values that MPI puts stay here until all ranks reach a PMI barrier. There each rank receives all values at once, and
// it answers from memory afterwards.
//
// MPI implementations of the MPICH family use the PMI-1 wire protocol at their start (lines of "cmd=... key=value\n")
// on the file descriptor PMI_FD. Under mpiexec the launcher answers it; torchrun does not, so this thread does. It is
// in C++ because MPI_Init may hold the GIL while it waits for an answer.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "job/rendezvous.hpp"

namespace fog {

class PmiServer {
 public:
  // No other code may use `rendezvous` until MPI_Init has returned. `job` names the job's key-value space; it must be
  // unique, since MPICH names its shared-memory segments after it. `mapping` is the answer to PMI_process_mapping.
  PmiServer(std::shared_ptr<Rendezvous> rendezvous, std::string job, std::string mapping);
  ~PmiServer();
  PmiServer(const PmiServer&) = delete;
  PmiServer& operator=(const PmiServer&) = delete;

  // The client's end, for PMI_FD. It stays open until the server is destroyed because MPI_Finalize uses it again.
  int client_fd() const {
    return client_fd_;
  }

  // The reason why the exchange with the other ranks failed; empty if it has not.
  std::string error() const;

 private:
  void serve_until_error();
  void serve();
  std::string answer(const std::string& line);

  void exchange();

  const std::shared_ptr<Rendezvous> rendezvous_;
  const std::string job_;
  const std::string mapping_;
  int client_fd_ = -1;
  int server_fd_ = -1;
  int barriers_ = 0;
  std::vector<std::string> put_; // "key=value" entries since the last barrier
  std::unordered_map<std::string, std::string> values_; // the values of all ranks
  mutable std::mutex mutex_;
  std::string error_;
  std::thread thread_;
};

} // namespace fog
