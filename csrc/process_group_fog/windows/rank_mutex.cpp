#include "windows/rank_mutex.hpp"

#include <algorithm>

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLook = std::chrono::milliseconds(50);

} // namespace

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
    const auto turn = [&] { return waiting_.front() == place; };
    while (!changed_.wait_until(lock, std::min(deadline, Clock::now() + kLook), turn)) {
      const bool late = Clock::now() >= deadline;
      lock.unlock();
      try {
        late ? time_out() : check();
      } catch (...) {
        lock.lock();
        waiting_.erase(std::find(waiting_.begin(), waiting_.end(), place));
        changed_.notify_all(); // it may have been its turn by now
        throw;
      }
      lock.lock();
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
