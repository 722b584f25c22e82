// Ranks of one process, for tests: each has its own engine and group. Over the in-process transport there can be hundreds of them.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "backend/process_group_fog.hpp"
#include "testing/network.hpp"

namespace fog {

// The engines have no threads: call progress() until the started operations are done. If a wire is named, they have those
// of a process, and each rank may be used by a thread of its own. ThreadSanitizer then sees all accesses to shared memory.
class VirtualWorld {
 public:
  struct Options {
    int size = 1;
    int ranks_per_host = 1; // this number of consecutive ranks share a virtual host
    std::vector<int> hosts; // if not empty: the number of each rank's host instead
    std::chrono::milliseconds timeout{0};
    bool confirm = false;
    std::string wire; // "in process", "memory" or "tcp"; "": in process, without threads
    InProcessNetwork::Options network;
  };
  explicit VirtualWorld(const Options& options);
  ~VirtualWorld() {
    close();
  }
  VirtualWorld(const VirtualWorld&) = delete;
  VirtualWorld& operator=(const VirtualWorld&) = delete;
  // Ends the threads.
  void close();

  const std::vector<c10::intrusive_ptr<ProcessGroupFog>>& groups() const {
    return groups_;
  }
  // Drives all engines until there is no progress and no message is in flight.
  void progress();
  InProcessNetwork::Counts counts() const;
  // Ends this rank's process without a goodbye. The other ranks see it at once, or never if it is not `noticed`.
  void lose(int rank, bool noticed);

 private:
  struct Engines; // outlives the groups
  // Makes the transports, and returns the address of each rank's memory.
  std::vector<std::string> connect(const Options& options);
  std::shared_ptr<Engines> engines_;
  const bool has_threads_;
  std::vector<c10::intrusive_ptr<ProcessGroupFog>> groups_;
};

} // namespace fog
