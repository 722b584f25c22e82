// Streams of the fake device: queues of host functions, each run in order by a thread of its own.
//
// A c10::Stream of the fake device has a Queue as its native handle (getStreamNativeHandle gives Queue*). Header only and without
// globals, so that several shared objects may use one Queue.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace device_double {

// The time for which the host waits for a device before it throws, so that a test fails instead of hanging.
constexpr std::chrono::seconds kPatience{20};

// A point in a stream, which has been reached or not. Thread-safe.
class Marker {
 public:
  void reach() {
    const std::lock_guard<std::mutex> lock(mutex_);
    reached_ = true;
    changed_.notify_all();
  }
  bool is_reached() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
  }
  // Blocks the calling thread. Returns whether the marker was reached within `patience`.
  bool wait(std::chrono::milliseconds patience = kPatience) const {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, patience, [&] { return reached_; });
  }
  // For a device, which waits without a limit.
  void wait_forever() const {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return reached_; });
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool reached_ = false;
};

using MarkerPtr = std::shared_ptr<const Marker>;

// One stream. Thread-safe. Like the streams of a device, it is never destroyed.
class Queue {
 public:
  Queue(int device, int64_t id) : device_(device), id_(id) {}
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  int device() const {
    return device_;
  }
  int64_t id() const {
    return id_;
  }

  // Never blocks. An exception of `function` is a failure of the device: drain() throws it, and later functions still run.
  void enqueue(std::function<void()> function) {
    const std::lock_guard<std::mutex> lock(mutex_);
    functions_.push_back(std::move(function));
    if (!has_thread_) {
      has_thread_ = true;
      std::thread([this] { run(); }).detach();
    }
    changed_.notify_all();
  }
  // Runs the function at once if the stream is idle, otherwise when the stream reaches it.
  void enqueue_or_run(std::function<void()> function) {
    if (is_free()) {
      function();
    } else {
      enqueue(std::move(function));
    }
  }
  // Returns a marker at the end of the present queue.
  MarkerPtr mark() {
    auto marker = std::make_shared<Marker>();
    if (is_free()) {
      marker->reach(); // no thread is needed
      return marker;
    }
    enqueue([marker] { marker->reach(); });
    return marker;
  }
  // Functions that are enqueued from now on wait for the marker. The host does not wait.
  void wait_for(MarkerPtr marker) {
    if (marker->is_reached()) {
      return;
    }
    enqueue([marker = std::move(marker)] { marker->wait_forever(); });
  }

  // Blocks until all enqueued functions have run. Throws std::runtime_error after kPatience, or if a function threw.
  void drain() {
    if (!mark()->wait()) {
      throw std::runtime_error(
          "the host waited " + std::to_string(kPatience.count()) + " s for stream " + std::to_string(id_) +
          " of double:" + std::to_string(device_) + ", which is held or waits for one that is");
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_) {
      std::rethrow_exception(std::exchange(failure_, nullptr));
    }
  }
  // Returns whether all enqueued functions have run.
  bool is_idle() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return functions_.empty() && !running_;
  }

  // Between hold() and release() no function starts, as if the device were busy. Holds are counted.
  void hold() {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++holds_;
  }
  void release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (holds_ == 0) {
      throw std::runtime_error("release of a stream that is not held");
    }
    --holds_;
    changed_.notify_all();
  }
  bool is_held() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return holds_ > 0;
  }

 private:
  bool is_free() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return functions_.empty() && !running_ && holds_ == 0;
  }
  [[noreturn]] void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return holds_ == 0 && !functions_.empty(); });
      running_ = true;
      auto function = std::move(functions_.front());
      functions_.pop_front();
      lock.unlock();
      std::exception_ptr failure;
      try {
        function();
      } catch (...) {
        failure = std::current_exception();
      }
      function = nullptr; // releases the objects that it keeps alive before the next function starts
      lock.lock();
      if (failure && !failure_) {
        failure_ = failure;
      }
      running_ = false;
    }
  }

  const int device_;
  const int64_t id_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> functions_;
  bool has_thread_ = false;
  bool running_ = false;
  int holds_ = 0;
  std::exception_ptr failure_;
};

} // namespace device_double
