#include "engine/completion_pool.hpp"

#include <exception>
#include <stdexcept>
#include <utility>

#include <c10/util/thread_name.h>

#include "core/failure.hpp"

namespace fog {
namespace {

thread_local bool is_pool_thread = false;

} // namespace

bool CompletionPool::is_current_thread() {
  return is_pool_thread;
}

void CompletionPool::add_thread() {
  threads_.emplace_back([this] { work(); });
  ++idle_;
}

void CompletionPool::start() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (threads_.empty() && !stopping_) {
    add_thread();
  }
}

void CompletionPool::run(std::function<void()> task, Refused refused) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    bool takes = !stopping_;
    if (!takes && refused == Refused::kThrow) {
      throw std::runtime_error("the program ends");
    }
    if (takes && tasks_.size() >= idle_) {
      try {
        add_thread();
      } catch (const std::exception&) {
        if (refused == Refused::kThrow) {
          throw;
        }
        takes = refused == Refused::kQueue && !threads_.empty();
        refused_ = takes;
      }
    }
    if (takes) {
      tasks_.push_back(std::move(task));
      changed_.notify_one();
      return;
    }
  }
  // The work that the callback starts and waits for is treated as if a thread of the pool had started it.
  const bool was_pool_thread = std::exchange(is_pool_thread, true);
  report_unowned_failure("a callback", task);
  is_pool_thread = was_pool_thread;
}

void CompletionPool::release(std::shared_ptr<void> object) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (threads_.empty()) {
    return;
  }
  try {
    released_.push_back(std::move(object));
    if (idle_ == 0) { // the callbacks may take as long as they want
      add_thread();
    }
  } catch (const std::exception&) {
  }
  changed_.notify_one();
}

void CompletionPool::grow() {
  if (!refused_.load(std::memory_order_relaxed)) {
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    while (tasks_.size() > idle_ && !stopping_) {
      add_thread();
      changed_.notify_one();
    }
    refused_ = false;
  } catch (const std::exception&) { // grow() is called again later
  }
}

void CompletionPool::work() {
  c10::setThreadName("fog_completion");
  is_pool_thread = true;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty() || (!released_.empty() && !releases_); });
    --idle_;
    if (!tasks_.empty()) {
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      report_unowned_failure("a callback", task);
      task = nullptr; // release its captures without the lock
      lock.lock();
    } else if (stopping_) {
      return;
    } else {
      auto released = std::exchange(released_, {});
      releases_ = true;
      lock.unlock();
      released.clear();
      lock.lock();
      releases_ = false;
    }
    ++idle_;
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
  released_.clear();
}

} // namespace fog
