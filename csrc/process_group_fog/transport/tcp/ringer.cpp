#include "transport/tcp/ringer.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include <c10/util/thread_name.h>

namespace fog::tcp {

Ringer::Ringer(int sockets, Doorbell& bell)
    : sockets_(sockets), bell_(bell), waiting_(epoll_create1(EPOLL_CLOEXEC)), stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event event = {};
  event.data.fd = sockets_; // without events it waits for arm()
  const bool waits = epoll_ctl(waiting_, EPOLL_CTL_ADD, sockets_, &event) == 0;
  event.events = EPOLLIN;
  event.data.fd = stop_;
  if (!waits || epoll_ctl(waiting_, EPOLL_CTL_ADD, stop_, &event) != 0) {
    return;
  }
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) { // the engine polls instead
  }
}

Ringer::~Ringer() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = write(stop_, &one, sizeof(one));
    thread_.join();
  }
  close_all();
}

void Ringer::close_all() {
  for (const int fd : {waiting_, stop_}) {
    if (fd >= 0) {
      close(fd);
    }
  }
}

void Ringer::arm() {
  if (works()) {
    epoll_event event = {};
    event.events = EPOLLIN | EPOLLONESHOT;
    event.data.fd = sockets_;
    epoll_ctl(waiting_, EPOLL_CTL_MOD, sockets_, &event);
  }
}

void Ringer::run() {
  c10::setThreadName("fog_tcp");
  for (;;) {
    epoll_event event = {};
    const int count = epoll_wait(waiting_, &event, 1, -1);
    if (count < 0 && errno != EINTR) {
      return;
    }
    if (count > 0 && event.data.fd == stop_) {
      return;
    }
    if (count > 0) {
      rung_.store(true, std::memory_order_release);
      if (bell_.listening.load() == 0) { // nothing is in flight here: the background thread does not listen, but may sleep
        bell_.wake(Doorbell::kBackground);
      }
      bell_.ring();
    }
  }
}

} // namespace fog::tcp
