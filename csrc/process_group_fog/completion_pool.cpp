#include "completion_pool.hpp"

#include <c10/util/thread_name.h>

namespace fog {
namespace {

thread_local bool is_pool_thread = false;

} // namespace

bool CompletionPool::is_current_thread() {
  return is_pool_thread;
}

void CompletionPool::run(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stopping_) {
      tasks_.push_back(std::move(task));
      if (tasks_.size() > idle_) {
        threads_.emplace_back([this] { work(); });
      }
      changed_.notify_one();
      return;
    }
  }
  task();
}

void CompletionPool::work() {
  c10::setThreadName("fog_completion");
  is_pool_thread = true;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    ++idle_;
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    --idle_;
    if (tasks_.empty()) {
      return;
    }
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    task = nullptr; // what it holds is released without the lock
    lock.lock();
  }
}

void CompletionPool::stop() {
  std::vector<std::thread> threads;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    threads.swap(threads_);
    changed_.notify_all();
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

} // namespace fog
