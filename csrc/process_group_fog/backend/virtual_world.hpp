// Hundreds of ranks in one process, for tests: each has an engine and a group of its own, over the in-process transport.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "backend/process_group_fog.hpp"
#include "transport/in_process/network.hpp"

namespace fog {

// No engine has a thread: whoever has started operations calls progress() until they are done.
class VirtualWorld {
 public:
  struct Options {
    int size = 1;
    int ranks_per_host = 1; // every so many consecutive ranks pretend to share a host
    std::vector<int> hosts; // or, if it is not empty, the number of each rank's host
    std::chrono::milliseconds timeout{0};
    bool confirm = false;
    InProcessNetwork::Options network;
  };
  explicit VirtualWorld(const Options& options);

  const std::vector<c10::intrusive_ptr<ProcessGroupFog>>& groups() const {
    return groups_;
  }
  // Drives all engines until nothing moves and no message is on its way.
  void progress();
  // What ranks have sent to each other; message by message since record() was called.
  Recording recorded() const;
  void record();
  // This rank's process ends without a goodbye. The others see it at once, or, where it is not `noticed`, never.
  void lose(int rank, bool noticed);

 private:
  struct Engines; // outlives the groups
  std::shared_ptr<Engines> engines_;
  std::vector<c10::intrusive_ptr<ProcessGroupFog>> groups_;
};

} // namespace fog
