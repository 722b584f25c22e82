#include "windows/rank_mutex.hpp"

#include <algorithm>

namespace fog {

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
