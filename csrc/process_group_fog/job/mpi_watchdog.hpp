// Ends calls of MPI that do not return.
//
// Whoever calls MPI holds the engine's lock, so a call that never returns (MPICH's Isend to a process that has gone, say) would
// keep every time-out from firing, and every other thread out. MPI has no means against that. So a thread of its own looks
// whether the same call has been going on beyond the deadline of an operation. If so it sends the thread that is in the call a
// signal, whose handler jumps out of it. The call then throws, as if MPI had reported an error, in the thread that holds the
// lock: operations fail as they do then. MPI is not called again in this process, as nobody knows in what state it is.
#pragma once

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
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

  // Starts to watch, unless it does. Before the first call; a process without MPI needs no such thread. Throws DistBackendError if the system
  // refuses it.
  void start();
  // No call is to last longer, also while no deadline is known.
  void set_patience(std::chrono::milliseconds patience);
  void stop();

  // --- with the engine's lock ---
  // Calls MPI. `peer` is a rank of the world, or -1. Throws DistBackendError if the call was ended, or an earlier one was.
  template <typename Call>
  int call(const char* name, int peer, Call&& call) {
    if (guard_) {
      guard_();
    }
    check();
    return run(name, peer, call);
  }
  // Throws DistBackendError if MPI cannot be called any more.
  void check() const {
    if (broken()) {
      throw_broken();
    }
  }
  // Is called before each call of MPI, and may break_off(); null: nothing is.
  void set_guard(std::function<void()> guard) {
    guard_ = std::move(guard);
  }
  // MPI is not to be called any more, for this reason.
  void break_off(const std::string& reason) {
    reason_ = reason;
    broken_ = true;
  }
  // The earliest deadline of what is in flight.
  void set_deadline(Deadline earliest) {
    deadline_.store(earliest.time_since_epoch().count(), std::memory_order_relaxed);
  }

  // --- by any thread ---
  // That of something new, also of a thread that waits for the engine's lock.
  void expect(Deadline deadline) {
    const auto count = deadline.time_since_epoch().count();
    auto earliest = deadline_.load(std::memory_order_relaxed);
    while (count < earliest && !deadline_.compare_exchange_weak(earliest, count, std::memory_order_relaxed)) {
    }
  }
  // Whether MPI must not be called any more, as a call was ended, say.
  bool broken() const {
    return broken_.load(std::memory_order_relaxed);
  }
  // Why; with the engine's lock.
  const std::string& reason() const {
    return reason_;
  }

 private:
  // Of the current call, beside its number.
  enum State : uint64_t { kOutside, kInside, kCondemned, kStates = 4 };

  // Not to be inlined: what the caller has in registers must be the same after the jump.
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
      await_signal(); // it has returned after all
    }
    return code;
  }
  [[noreturn]] void throw_ended();
  [[noreturn]] void throw_broken() const;
  void await_signal() const;
  void watch();
  void end_call(uint64_t number);
  static void on_signal(int signal, siginfo_t* info, void* context);

  // Written by the thread that is in the call; read by the watchdog while it is there.
  std::atomic<uint64_t> state_{kOutside};
  uint64_t number_ = 0;
  std::atomic<const char*> name_{nullptr};
  std::atomic<int> peer_{-1};
  std::atomic<pthread_t> thread_{};
  jmp_buf place_;

  std::atomic<uint64_t> signalled_{0}; // the call whose thread has been sent the signal
  std::atomic<bool> broken_{false};
  std::string reason_; // with the engine's lock, as is the next
  std::function<void()> guard_;
  std::atomic<int64_t> deadline_{Deadline::max().time_since_epoch().count()};
  std::atomic<int64_t> patience_ms_{std::chrono::milliseconds::max().count()};

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread thread_of_watch_;
};

} // namespace fog
