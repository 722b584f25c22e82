#include "peer_watch.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

namespace fog::mpi {

PeerWatch::PeerWatch() : epoll_fd_(epoll_create1(EPOLL_CLOEXEC)) {}

PeerWatch::~PeerWatch() {
  for (const auto& [peer, fd] : fds_) {
    close(fd);
  }
  close(epoll_fd_);
}

void PeerWatch::watch(int peer, int pid) {
  if (fds_.count(peer) > 0) {
    return;
  }
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); // close-on-exec by definition
  if (fd < 0) {
    if (errno == ESRCH) {
      ended_already_.push_back(peer);
    }
    return;
  }
  add(peer, fd, EPOLLIN);
}

void PeerWatch::watch_connection(int peer, int fd) {
  connections_[peer] = false;
  add(peer, fd, EPOLLIN | EPOLLRDHUP);
}

void PeerWatch::add(int peer, int fd, unsigned events) {
  epoll_event event = {};
  event.events = events;
  event.data.u32 = static_cast<uint32_t>(peer);
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    close(fd);
    return;
  }
  fds_.emplace(peer, fd);
}

std::vector<int> PeerWatch::ended() {
  auto peers = std::exchange(ended_already_, {});
  if (fds_.empty()) {
    return peers;
  }
  std::array<epoll_event, 16> events;
  const int count = epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const auto peer = static_cast<int>(events[i].data.u32);
    const auto found = fds_.find(peer);
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, found->second, nullptr);
    close(found->second);
    fds_.erase(found);
    if (const auto connection = connections_.find(peer); connection != connections_.end()) {
      connection->second = true;
    }
    peers.push_back(peer);
  }
  return peers;
}

bool PeerWatch::disconnected(int peer) const {
  const auto connection = connections_.find(peer);
  if (connection == connections_.end()) {
    return false;
  }
  const auto found = fds_.find(peer);
  if (connection->second || found == fds_.end()) {
    return connection->second;
  }
  pollfd polled = {found->second, POLLIN | POLLRDHUP, 0};
  return poll(&polled, 1, 0) > 0;
}

} // namespace fog::mpi
