// A mutex between two processes.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "core/deadline.hpp"

namespace fog {

// Lives in memory that both processes have mapped; all zero means free. The mutex is fair: unlock() hands it over if
// the other side waits, so neither side gets it twice while the other one waits. A process is one side; its threads
// decide among themselves which of them uses the mutex. Waiting uses a futex.
class PairMutex {
 public:
  enum class Side : uint32_t { kFirst = 1, kSecond = 2 };

  // Takes the mutex if it is free. Otherwise this side waits from now on: it owns the mutex once held_by() says so, and
  // wait() sleeps until then. Returns whether this side owns the mutex now, also after a handover.
  bool lock_or_queue(Side side);
  // Takes the mutex if it is free; does not wait.
  bool try_lock(Side side);
  // Waits until the mutex is handed to this side, or for `limit`; may return early. Returns whether this side owns it
  // now.
  bool wait(Side side, std::chrono::nanoseconds limit);
  // Ends this side's waiting. Returns false if the mutex was handed over meanwhile: then this side owns it.
  bool give_up(Side side);
  // Does nothing if this side does not own the mutex any more.
  void unlock(Side side);
  // Takes the mutex from the other side, whose process has ended or must not be waited for. Waiting sides have to queue
  // again.
  void seize(Side side);

  bool held_by(Side side) const {
    return (state_.load(std::memory_order_acquire) & kHolder) == static_cast<uint32_t>(side);
  }

 private:
  static constexpr uint32_t kHolder = 3; // a Side, or 0
  // The bit that is set while that side waits.
  static constexpr uint32_t waits(Side side) {
    return static_cast<uint32_t>(side) << 2;
  }
  static constexpr Side other(Side side) {
    return side == Side::kFirst ? Side::kSecond : Side::kFirst;
  }

  std::atomic<uint32_t> state_;
};

// One process's side of a mutex that it shares with another process.

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
