// Threads that run what hangs on an operation's Future.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace fog {

// A callback may wait for another operation's Future (PowerSGD's hook for DistributedDataParallel does), and that one's
// callbacks need a thread as well. So the pool grows whenever all its threads are taken; mostly it has one. The
// threads that drive operations run no callbacks of Futures that somebody holds, but where the system refuses threads.
//
// An exception that a task lets out is reported on stderr, and the thread goes on.
class CompletionPool {
 public:
  // What becomes of a task that needs a new thread when the system refuses one.
  enum class Refused {
    kQueue, // it waits for a thread that there is, or for grow()
    kRunHere, // it runs in the caller: a thread of the pool may be waiting for it
    kThrow, // std::exception: it was not taken
  };

  // Makes the first thread, so that tasks that are queued come to their turn whatever happens. Throws std::system_error.
  void start();
  void run(std::function<void()> task, Refused refused);
  // Tries once more to make the threads that were refused; nothing if none were.
  void grow();
  // Whether this thread is one of a pool's.
  static bool is_current_thread();
  // Runs what is queued and ends the threads; later tasks run in the caller.
  void stop();

 private:
  void work();
  void add_thread();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0; // threads that have no task, or are about to look for one
  std::atomic<bool> refused_{false}; // a task in the queue lacks a thread
  bool stopping_ = false;
};

} // namespace fog
