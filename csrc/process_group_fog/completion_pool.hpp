// Threads that run what hangs on an operation's Future.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace fog {

// A callback may wait for another operation's Future (PowerSGD's hook for DistributedDataParallel does), and that one's
// callbacks need a thread as well. So the pool grows whenever all its threads are taken; mostly it has one or none. The
// threads that drive operations never run callbacks of Futures that somebody holds.
class CompletionPool {
 public:
  void run(std::function<void()> task);
  // Whether this thread is one of a pool's.
  static bool is_current_thread();
  // Runs what is queued and ends the threads; later tasks run in the caller.
  void stop();

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool stopping_ = false;
};

} // namespace fog
