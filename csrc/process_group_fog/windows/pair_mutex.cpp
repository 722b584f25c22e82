#include "windows/pair_mutex.hpp"

#include <algorithm>

#include "transport/futex.hpp"

namespace fog {

bool PairMutex::try_lock(Side side) {
  uint32_t state = state_.load(std::memory_order_relaxed);
  while ((state & kHolder) == 0) {
    if (state_.compare_exchange_weak(state, state | static_cast<uint32_t>(side), std::memory_order_acquire)) {
      return true;
    }
  }
  return false;
}

bool PairMutex::lock_or_queue(Side side) {
  uint32_t state = state_.load(std::memory_order_relaxed);
  while ((state & kHolder) != static_cast<uint32_t>(side)) {
    const uint32_t next = (state & kHolder) == 0 ? state | static_cast<uint32_t>(side) : state | waits(side);
    if (state_.compare_exchange_weak(state, next, std::memory_order_acquire)) {
      return (state & kHolder) == 0;
    }
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

bool PairMutex::wait(Side side, std::chrono::nanoseconds limit) {
  const uint32_t state = state_.load(std::memory_order_acquire);
  if ((state & kHolder) != static_cast<uint32_t>(side)) {
    futex_wait(state_, state, limit);
  }
  return held_by(side);
}

bool PairMutex::give_up(Side side) {
  uint32_t state = state_.load(std::memory_order_relaxed);
  while ((state & kHolder) != static_cast<uint32_t>(side)) {
    if (state_.compare_exchange_weak(state, state & ~waits(side), std::memory_order_acquire)) {
      return true;
    }
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  return false;
}

void PairMutex::unlock(Side side) {
  uint32_t state = state_.load(std::memory_order_relaxed);
  while ((state & kHolder) == static_cast<uint32_t>(side)) {
    const bool hand_over = (state & waits(other(side))) != 0;
    const uint32_t next = hand_over ? (state & ~(kHolder | waits(other(side)))) | static_cast<uint32_t>(other(side)) : state & ~kHolder;
    if (state_.compare_exchange_weak(state, next, std::memory_order_release)) {
      if (hand_over) {
        futex_wake(state_);
      }
      return;
    }
  }
}

void PairMutex::seize(Side side) {
  state_.store(static_cast<uint32_t>(side), std::memory_order_seq_cst);
}

using Clock = std::chrono::steady_clock;

bool RankMutex::held_here() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return depth_ > 0 && holder_ == std::this_thread::get_id();
}

// Requires `mutex_`.
bool RankMutex::lock_again() {
  const bool mine = depth_ > 0 && holder_ == std::this_thread::get_id();
  depth_ += mine ? 1 : 0;
  return mine;
}

bool RankMutex::lock(Deadline deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (lock_again()) {
    return true;
  }
  const auto place = next_++;
  waiting_.push_back(place);
  bool acquired = false;
  try {
    acquired = acquire(place, lock, deadline);
  } catch (...) {
    leave(place);
    throw;
  }
  if (!acquired) {
    leave(place);
    return false;
  }
  const std::lock_guard<std::mutex> relock(mutex_);
  holder_ = std::this_thread::get_id();
  depth_ = 1;
  return true;
}

// Releases `held` in any case.
bool RankMutex::acquire(uint64_t place, std::unique_lock<std::mutex>& held, Deadline deadline) {
  auto lock = std::move(held);
  const auto turn = [&] { return waiting_.front() == place; };
  while (!changed_.wait_until(lock, std::min(deadline, Clock::now() + kPollInterval), turn)) {
    lock.unlock();
    if (Clock::now() >= deadline) {
      return false;
    }
    check_();
    lock.lock();
  }
  lock.unlock();
  return other_.acquire(deadline);
}

void RankMutex::leave(uint64_t place) {
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_.erase(std::find(waiting_.begin(), waiting_.end(), place));
  changed_.notify_all(); // it may have been the first in the queue
}

bool RankMutex::try_lock() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (lock_again()) {
    return true;
  }
  if (!waiting_.empty() || !other_.try_acquire()) {
    return false;
  }
  waiting_.push_back(next_++);
  holder_ = std::this_thread::get_id();
  depth_ = 1;
  return true;
}

void RankMutex::unlock() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--depth_ > 0) {
      return;
    }
    holder_ = std::thread::id();
  }
  other_.release(); // before the process's next thread, so that the other process gets its turn
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_.pop_front();
  changed_.notify_all();
}

} // namespace fog
