// Ends calls of MPI that do not return.
//
// The caller of MPI holds the engine's lock, so a call that never returns (for example a flush to a process that has
// ended) would block all other threads and all timeouts. MPI offers no remedy. So a separate thread checks whether
// one call goes on beyond the deadline of an operation. If so, it sends a signal to the thread that is in the call, and
// the signal's handler jumps out of the call. The call then throws in the thread that holds the lock, as if MPI had
// reported an error, and operations fail as usual. The state of MPI is unknown after that, so this process never calls
// it again.
#pragma once

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "core/deadline.hpp"

namespace fog {

class Watchdog {
 public:
  Watchdog() = default;
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Starts the thread, unless it runs already. Call this before the first call of MPI; a process without MPI needs no
  // such thread. Throws DistBackendError if the system cannot create the thread.
  void start();
  // Limits the time of every call, even if no deadline is known.
  void set_patience(std::chrono::milliseconds patience);
  void stop();

  // --- the caller holds the engine's lock ---
  // Calls MPI. `peer` is a rank of the world, or -1. Throws DistBackendError if the watchdog ended this call or an
  // earlier one.
  template <typename Call>
  int call(const char* name, int peer, Call&& call) {
    check();
    return run(name, peer, call);
  }
  // Throws DistBackendError if MPI cannot be called any more.
  void check() const {
    if (broken()) {
      throw_broken();
    }
  }
  // Sets the earliest deadline of all operations in flight.
  void set_deadline(Deadline earliest) {
    deadline_.store(earliest.time_since_epoch().count(), std::memory_order_relaxed);
  }

  // --- any thread ---
  // Adds the deadline of a new operation, also from a thread that waits for the engine's lock.
  void expect(Deadline deadline) {
    const auto count = deadline.time_since_epoch().count();
    auto earliest = deadline_.load(std::memory_order_relaxed);
    while (count < earliest && !deadline_.compare_exchange_weak(earliest, count, std::memory_order_relaxed)) {
    }
  }
  // Returns whether MPI must not be called any more, for example because a call was ended.
  bool broken() const {
    return broken_.load(std::memory_order_relaxed);
  }
  // The reason; the caller holds the engine's lock.
  const std::string& reason() const {
    return reason_;
  }

 private:
  // State of the current call, stored beside its number.
  enum State : uint64_t { kOutside, kInside, kCondemned, kStates = 4 };

  // Must not be inlined: the registers of the caller must have the same contents after the jump.
  template <typename Call>
  __attribute__((noinline)) int run(const char* name, int peer, Call& call) {
    if (_setjmp(place_) != 0) {
      throw_ended();
    }
    name_.store(name, std::memory_order_relaxed);
    peer_.store(peer, std::memory_order_relaxed);
    thread_.store(pthread_self(), std::memory_order_relaxed);
    number_ += kStates;
    state_.store(number_ | kInside, std::memory_order_release);
    const int code = call();
    if (state_.exchange(number_ | kOutside, std::memory_order_acq_rel) != (number_ | kInside)) {
      await_signal(); // the call has returned after all
    }
    return code;
  }
  [[noreturn]] void throw_ended();
  [[noreturn]] void throw_broken() const;
  void await_signal() const;
  void watch();
  void end_call(uint64_t number);
  static void on_signal(int signal, siginfo_t* info, void* context);

  // The thread in the call writes these; the watchdog reads them during the call.
  std::atomic<uint64_t> state_{kOutside};
  uint64_t number_ = 0;
  std::atomic<const char*> name_{nullptr};
  std::atomic<int> peer_{-1};
  std::atomic<pthread_t> thread_{};
  jmp_buf place_;

  std::atomic<uint64_t> signalled_{0}; // number of the call whose thread the signal was sent to
  std::atomic<bool> broken_{false};
  std::string reason_; // needs the engine's lock
  std::atomic<int64_t> deadline_{Deadline::max().time_since_epoch().count()};
  std::atomic<int64_t> patience_ms_{std::chrono::milliseconds::max().count()};

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread thread_of_watch_;
};

} // namespace fog
