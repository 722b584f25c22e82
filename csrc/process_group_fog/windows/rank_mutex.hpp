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

// How long a wait lasts before it checks whether the other process has gone and whether it is interrupted.
constexpr auto kPollInterval = std::chrono::milliseconds(10);

// Held by one thread, which may lock it again. The process's threads get it in the order of their requests.
class RankMutex {
 public:
  // How the process gets the mutex from the other process and gives it back.
  struct Other {
    std::function<bool(Deadline)> acquire; // returns false at the deadline; may throw
    std::function<bool()> try_acquire;
    std::function<void()> release;
  };
  // `check` is called from time to time while a thread waits for other threads of this process; it may throw.
  RankMutex(Other other, std::function<void()> check) : other_(std::move(other)), check_(std::move(check)) {}

  // Returns false at the deadline. Passes on exceptions of the functions above.
  bool lock(Deadline deadline);
  // Returns false if the mutex is not free.
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
  std::deque<uint64_t> waiting_; // the first has the mutex, or is acquiring it
  uint64_t next_ = 0;
  std::thread::id holder_;
  size_t depth_ = 0;
};

} // namespace fog
