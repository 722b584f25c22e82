// Notices at once when a process of the same host ends.
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

  // Watches process `pid` under the number `peer`. Where the kernel has no pidfd, nothing is noticed and time-outs decide.
  void watch(int peer, int pid);

  // Whether that process is watched and has ended, as far as can be known now: a system call.
  bool has_ended(int peer) const;

  // How many of the watched processes have ended so far: a system call.
  size_t ends() const;

  // Numbers of the watched processes that have ended since the last call.
  std::vector<int> ended();

 private:
  int epoll_fd_;
  std::unordered_map<int, int> pidfds_; // by peer
  std::vector<int> ended_already_;
  std::unordered_set<int> known_; // to have ended
};

} // namespace fog
