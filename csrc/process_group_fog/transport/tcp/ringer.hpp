// Rings the doorbell when sockets have news, so that the engine's threads can sleep.
//
// The engine sleeps on a futex, which peers of its host wake; a socket cannot. So a thread waits for the sockets, but only
// once for each time that the engine has gone to sleep: it costs nothing while the engine looks by itself.
#pragma once

#include <atomic>
#include <thread>

#include "transport/doorbell.hpp"

namespace fog::tcp {

class Ringer {
 public:
  // `sockets` is an epoll descriptor: the sockets whose news ring `bell`.
  Ringer(int sockets, Doorbell& bell);
  ~Ringer();
  Ringer(const Ringer&) = delete;
  Ringer& operator=(const Ringer&) = delete;

  // Returns false if the system has refused the thread, so that nothing rings the bell.
  bool works() const {
    return thread_.joinable();
  }
  // Any thread, after Doorbell::listen() and before the sleep: the next news rings the bell, once.
  void arm();
  // Any thread: returns whether the bell was rung, and heard() has not been called since.
  bool rung() const {
    return rung_.load(std::memory_order_acquire);
  }
  void heard() {
    if (rung()) {
      rung_.store(false, std::memory_order_release);
    }
  }
  // For a forked child, which has no such thread.
  void close_all();

 private:
  void run();

  const int sockets_;
  Doorbell& bell_;
  const int waiting_; // an epoll descriptor with sockets_ and stop_
  const int stop_; // an eventfd
  std::atomic<bool> rung_{false};
  std::thread thread_;
};

} // namespace fog::tcp
