// Strategies for waiting for progress without wasting the core.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>

namespace fog {

// Spins while an answer within microseconds is likely, then yields the core between polls, then sleeps for increasing
// times. With more ranks than cores it never spins: the awaited rank may need this core.
class Backoff {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Backoff(bool oversubscribed) : may_spin_(!oversubscribed), spins_(may_spin_) {}

  void reset() {
    polls_ = 0;
    sleep_ = kFirstSleep;
    spins_ = may_spin_;
    spinning_since_ = {};
  }

  // Call before a poll: checks for a microsecond or two whether there is anything to poll for. Spinning consists of
  // these checks: a poll takes the engine's lock and reads the clock, whereas `look` only reads a word that a peer
  // writes to.
  template <typename Look>
  void spin(Look&& look) const {
    for (int looks = 0; spins_ && looks < kLooks && !look(); ++looks) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }

  // Call after a poll without result: returns whether to keep spinning.
  bool spins(Clock::time_point now) {
    if (spins_) {
      spinning_since_ = spinning_since_ == Clock::time_point() ? now : spinning_since_;
      spins_ = now - spinning_since_ < kSpinTime;
    }
    return spins_;
  }

  // Yields the core and returns 0, or returns how long to sleep. `bell`: the sleep ends as soon as there is news, so
  // sleeping begins early: a woken sleeper gets its core back at once, but a thread that yields only after the threads
  // that compute. If such threads have delayed a yield lately, sleeping begins at once.
  std::chrono::nanoseconds pause(bool bell) {
    ++polls_;
    if (polls_ <= (bell ? kYieldsWithBell : kYields)) {
      const auto before = Clock::now();
      if (bell && before.time_since_epoch().count() < crowded_until_.load(std::memory_order_relaxed)) {
        return kFirstSleep;
      }
      sched_yield();
      if (const auto now = Clock::now(); now - before > kCrowded) {
        crowded_until_.store((now + kCrowdedTime).time_since_epoch().count(), std::memory_order_relaxed);
      }
      return std::chrono::nanoseconds(0);
    }
    const auto now = sleep_;
    sleep_ = std::min(sleep_ * 2, kLongestSleep);
    return now;
  }

 private:
  static constexpr int kLooks = 64; // per spin()
  // Twice the cost of sleeping and waking up; longer than a peer takes to copy a chunk.
  static constexpr std::chrono::nanoseconds kSpinTime = std::chrono::microseconds(100);
  static constexpr int kYields = 500;
  static constexpr int kYieldsWithBell = 5;
  static constexpr std::chrono::nanoseconds kFirstSleep = std::chrono::microseconds(20);
  static constexpr std::chrono::nanoseconds kLongestSleep = std::chrono::milliseconds(1);

  // A yield that took longer than this means that another program uses the core. Ranks of this job use it for less,
  // except for large sums.
  static constexpr std::chrono::nanoseconds kCrowded = std::chrono::microseconds(500);
  static constexpr std::chrono::nanoseconds kCrowdedTime = std::chrono::milliseconds(100);

  static inline std::atomic<Clock::rep> crowded_until_{0}; // until then no yields: one took longer than kCrowded

  const bool may_spin_;
  bool spins_;
  Clock::time_point spinning_since_;
  int polls_ = 0;
  std::chrono::nanoseconds sleep_ = kFirstSleep;
};

} // namespace fog
