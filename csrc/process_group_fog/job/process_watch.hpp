// Notices immediately when a process of the same host ends.
#pragma once

#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace fog {

// Every call needs the engine's lock.
class ProcessWatch {
 public:
  ProcessWatch();
  ~ProcessWatch();
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  // Watches process `pid` under the number `peer`. On a kernel without pidfd it has no effect, and timeouts are the
  // only sign.
  void watch(int peer, int pid);

  // Forgets that process, so that another one can be watched under its number.
  void forget(int peer);

  // Returns whether that process is watched and known to have ended. Costs a system call.
  bool has_ended(int peer) const;

  // Returns the numbers of the watched processes that have ended since the last call.
  std::vector<int> ended();

 private:
  int epoll_fd_;
  std::unordered_map<int, int> pidfds_; // by peer
  std::vector<int> ended_already_;
  std::unordered_set<int> known_; // processes that are known to have ended
};

} // namespace fog
