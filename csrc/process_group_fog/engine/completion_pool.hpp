// Threads that run the callbacks of operations' Futures.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace fog {

// A callback may wait for another operation's Future (PowerSGD's hook for DistributedDataParallel does), whose
// callbacks need a thread as well. So the pool grows whenever all its threads are busy; usually it has one. The threads
// that drive operations do not run callbacks of Futures that the program holds, except if the system refuses new
// threads.
//
// An exception that a task throws is reported on stderr, and the thread continues.
class CompletionPool {
 public:
  // The handling of a task that needs a new thread when the system refuses one.
  enum class Refused {
    kQueue, // the task waits for an existing thread or for grow()
    kRunHere, // the task runs in the caller, because the pool's threads may be waiting for it
    kThrow, // run() throws std::exception and does not take the task
  };

  // Creates the first thread, so that queued tasks run in any case. Throws std::system_error.
  void start();
  void run(std::function<void()> task, Refused refused);
  // Releases the object in a thread of the pool, or at once without threads: its end may have to wait for Python's lock.
  void release(std::shared_ptr<void> object) noexcept;
  // Tries again to create the threads that were refused, if any.
  void grow();
  // Returns whether the calling thread belongs to a pool.
  static bool is_current_thread();
  // Runs the queued tasks and ends the threads; later tasks run in the caller.
  void stop();

 private:
  void work();
  void add_thread();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  std::vector<std::shared_ptr<void>> released_;
  bool releases_ = false; // a thread does so: a second one would only wait for the same lock
  size_t idle_ = 0; // threads without a task, including those that are about to fetch one
  std::atomic<bool> refused_{false}; // a queued task has no thread
  bool stopping_ = false;
};

} // namespace fog
