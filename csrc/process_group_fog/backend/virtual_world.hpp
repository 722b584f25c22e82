// Hundreds of ranks in one process, for tests: each has its own engine and group, over the in-process transport.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "backend/process_group_fog.hpp"
#include "transport/in_process/network.hpp"

namespace fog {

// The engines have no threads: call progress() until the started operations are done.
class VirtualWorld {
 public:
  struct Options {
    int size = 1;
    int ranks_per_host = 1; // this number of consecutive ranks share a virtual host
    std::vector<int> hosts; // if not empty: the number of each rank's host instead
    std::chrono::milliseconds timeout{0};
    bool confirm = false;
    InProcessNetwork::Options network;
  };
  explicit VirtualWorld(const Options& options);

  const std::vector<c10::intrusive_ptr<ProcessGroupFog>>& groups() const {
    return groups_;
  }
  // Drives all engines until there is no progress and no message is in flight.
  void progress();
  // Returns the messages between ranks; each single one of those since record() was called.
  Recording recorded() const;
  void record();
  // Ends this rank's process without a goodbye. The other ranks see it at once, or never if it is not `noticed`.
  void lose(int rank, bool noticed);

 private:
  struct Engines; // outlives the groups
  std::shared_ptr<Engines> engines_;
  std::vector<c10::intrusive_ptr<ProcessGroupFog>> groups_;
};

} // namespace fog
