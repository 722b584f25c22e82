#include "job/process_watch.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace fog {

ProcessWatch::ProcessWatch() : epoll_fd_(epoll_create1(EPOLL_CLOEXEC)) {}

ProcessWatch::~ProcessWatch() {
  for (const auto& [peer, fd] : pidfds_) {
    close(fd);
  }
  close(epoll_fd_);
}

void ProcessWatch::watch(int peer, int pid) {
  if (pidfds_.count(peer) > 0) {
    return;
  }
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); // always close-on-exec
  if (fd < 0) {
    if (errno == ESRCH) {
      ended_already_.push_back(peer);
      known_.insert(peer);
    }
    return;
  }
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u32 = static_cast<uint32_t>(peer);
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    close(fd);
    return;
  }
  pidfds_.emplace(peer, fd);
}

void ProcessWatch::forget(int peer) {
  if (const auto found = pidfds_.find(peer); found != pidfds_.end()) {
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, found->second, nullptr);
    close(found->second);
    pidfds_.erase(found);
  }
  known_.erase(peer);
  ended_already_.erase(std::remove(ended_already_.begin(), ended_already_.end(), peer), ended_already_.end());
}

bool ProcessWatch::has_ended(int peer) const {
  if (known_.count(peer) > 0) {
    return true;
  }
  const auto found = pidfds_.find(peer);
  pollfd state = {found == pidfds_.end() ? -1 : found->second, POLLIN, 0};
  return state.fd >= 0 && poll(&state, 1, 0) > 0;
}

std::vector<int> ProcessWatch::ended() {
  auto peers = std::exchange(ended_already_, {});
  if (pidfds_.empty()) {
    return peers;
  }
  std::array<epoll_event, 16> events;
  const int count = epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const auto peer = static_cast<int>(events[i].data.u32);
    const auto found = pidfds_.find(peer);
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, found->second, nullptr);
    close(found->second);
    pidfds_.erase(found);
    known_.insert(peer);
    peers.push_back(peer);
  }
  return peers;
}

} // namespace fog
