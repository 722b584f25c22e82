// One process's side of a mutex that it shares with another process.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "core/deadline.hpp"

namespace fog {

// How long a wait lasts before it looks whether whom it waits for has gone, and whether it is interrupted.
constexpr auto kPollInterval = std::chrono::milliseconds(10);

// A thread holds it, which may lock it again; the process's threads come in the order in which they asked.
class RankMutex {
 public:
  // This is how the process settles it with the other one.
  struct Other {
    std::function<bool(Deadline)> acquire; // false at the deadline; may throw
    std::function<bool()> try_acquire;
    std::function<void()> release;
  };
  // `check` is called every now and then while a thread waits for others of this process; it may throw.
  RankMutex(Other other, std::function<void()> check) : other_(std::move(other)), check_(std::move(check)) {}

  // It returns false at the deadline, and throws what these functions throw.
  bool lock(Deadline deadline);
  // It returns false if the mutex is not free.
  bool try_lock();
  void unlock();
  bool held_here();

 private:
  bool lock_again();
  bool acquire(uint64_t place, std::unique_lock<std::mutex>& held, Deadline deadline);
  void leave(uint64_t place);

  const Other other_;
  const std::function<void()> check_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<uint64_t> waiting_; // the first has it, or is about to
  uint64_t next_ = 0;
  std::thread::id holder_;
  size_t depth_ = 0;
};

} // namespace fog
