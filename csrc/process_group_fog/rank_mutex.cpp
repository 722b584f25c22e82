#include "rank_mutex.hpp"

#include <algorithm>

namespace fog {

bool RankMutex::held_here() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return depth_ > 0 && holder_ == std::this_thread::get_id();
}

void RankMutex::lock(Deadline deadline) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (depth_ > 0 && holder_ == std::this_thread::get_id()) {
      ++depth_;
      return;
    }
    const auto place = next_++;
    waiting_.push_back(place);
    if (!changed_.wait_until(lock, deadline, [&] { return waiting_.front() == place; })) {
      waiting_.erase(std::find(waiting_.begin(), waiting_.end(), place));
      time_out();
    }
  }
  try {
    if (!acquire(deadline)) {
      time_out();
    }
  } catch (...) {
    leave();
    throw;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  holder_ = std::this_thread::get_id();
  depth_ = 1;
}

bool RankMutex::try_lock() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (depth_ > 0 && holder_ == std::this_thread::get_id()) {
    ++depth_;
    return true;
  }
  if (!waiting_.empty() || !try_acquire()) {
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
  release(); // before the next thread comes: the other process has its turn
  leave();
}

} // namespace fog
