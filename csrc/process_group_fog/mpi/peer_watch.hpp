// Notices at once when another process ends: on this host by its pidfd, elsewhere by a connection with it.
#pragma once

#include <unordered_map>
#include <vector>

namespace fog::mpi {

// Every call needs the engine's lock.
class PeerWatch {
 public:
  PeerWatch();
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  // Watches process `pid` under the number `peer`. Where the kernel has no pidfd, nothing is noticed and time-outs decide.
  void watch(int peer, int pid);
  // Watches a process that holds the other end of a connection, which is the watch's own from now on.
  void watch_connection(int peer, int fd);

  // Numbers of the watched processes that have ended since the last call.
  std::vector<int> ended();
  // Whether the connection with this one is there no more.
  bool disconnected(int peer) const;

 private:
  void add(int peer, int fd, unsigned events);

  int epoll_fd_;
  std::unordered_map<int, int> fds_; // by peer
  std::unordered_map<int, bool> connections_; // by peer: whether it is closed
  std::vector<int> ended_already_;
};

} // namespace fog::mpi
