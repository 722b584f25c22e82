// One process's side of a mutex that it shares with another process.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "core/deadline.hpp"

namespace fog {

// Held by a thread, which may lock it again; its threads come in the order in which they asked. The other process is the
// business of whoever derives from this.
class RankMutex {
 public:
  virtual ~RankMutex() = default;
  // Throws what the other process's side throws: at the deadline, say.
  void lock(Deadline deadline);
  // False if it is not free.
  bool try_lock();
  void unlock();
  bool held_here();

 protected:
  // False at the deadline.
  virtual bool acquire(Deadline deadline) = 0;
  virtual bool try_acquire() = 0;
  virtual void release() = 0;
  // Called every now and then while a thread waits for others of this process; may throw.
  virtual void check() = 0;
  [[noreturn]] virtual void time_out() = 0;

 private:
  void leave();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<uint64_t> waiting_; // the first has it, or is about to
  uint64_t next_ = 0;
  std::thread::id holder_;
  size_t depth_ = 0;
};

} // namespace fog
