#include "windows/rank_mutex.hpp"

#include <algorithm>

namespace fog {

using Clock = std::chrono::steady_clock;

bool RankMutex::held_here() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return depth_ > 0 && holder_ == std::this_thread::get_id();
}

// With `mutex_`.
bool RankMutex::lock_again() {
  const bool mine = depth_ > 0 && holder_ == std::this_thread::get_id();
  depth_ += mine ? 1 : 0;
  return mine;
}

// Waits for this process's threads that came before.
bool RankMutex::enter(Deadline deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto place = next_++;
  waiting_.push_back(place);
  const auto turn = [&] { return waiting_.front() == place; };
  const auto give_up = [&] {
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), place));
    changed_.notify_all(); // it may have been its turn by now
  };
  while (!changed_.wait_until(lock, std::min(deadline, Clock::now() + kPollInterval), turn)) {
    if (Clock::now() >= deadline) {
      give_up();
      return false;
    }
    lock.unlock();
    try {
      check_();
    } catch (...) {
      lock.lock();
      give_up();
      throw;
    }
    lock.lock();
  }
  return true;
}

bool RankMutex::lock(Deadline deadline) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (lock_again()) {
      return true;
    }
  }
  if (!enter(deadline)) {
    return false;
  }
  bool acquired = false;
  try {
    acquired = other_.acquire(deadline);
  } catch (...) {
    leave();
    throw;
  }
  if (!acquired) {
    leave();
    return false;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  holder_ = std::this_thread::get_id();
  depth_ = 1;
  return true;
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

void RankMutex::leave() {
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_.pop_front();
  changed_.notify_all();
}

void RankMutex::unlock() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (--depth_ > 0) {
      return;
    }
    holder_ = std::thread::id();
  }
  other_.release(); // before the next thread comes: the other process has its turn
  leave();
}

} // namespace fog
