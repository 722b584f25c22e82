// How a thread waits for progress without wasting the core it waits on.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>

namespace fog {

// Spins while an answer within microseconds is likely, then gives the core to others between polls, then sleeps longer and
// longer. With more ranks than cores there is no spinning: the one to wait for may need this very core.
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

  // Before a poll: looks, for a microsecond or two, whether there is something to poll for. That is what spinning is: a poll takes the engine's
  // lock and reads the clock, a look reads a word that a peer writes to.
  template <typename Look>
  void spin(Look&& look) const {
    for (int looks = 0; spins_ && looks < kLooks && !look(); ++looks) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }

  // Whether it goes on spinning after a poll in vain.
  bool spins(Clock::time_point now) {
    if (spins_) {
      spinning_since_ = spinning_since_ == Clock::time_point() ? now : spinning_since_;
      spins_ = now - spinning_since_ < kSpinTime;
    }
    return spins_;
  }

  // Gives the core to others, or returns how long to sleep. `bell`: something will end the sleep in time. Then it
  // begins soon: a sleeper gets its core back at once when it is woken, a thread that yields only after those that compute. Where there are
  // such, it begins at once.
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
  static constexpr int kLooks = 64; // of one spin()
  // Twice what it costs to sleep and be woken; longer than a peer takes to copy a chunk.
  static constexpr std::chrono::nanoseconds kSpinTime = std::chrono::microseconds(100);
  static constexpr int kYields = 500;
  static constexpr int kYieldsWithBell = 5;
  static constexpr std::chrono::nanoseconds kFirstSleep = std::chrono::microseconds(20);
  static constexpr std::chrono::nanoseconds kLongestSleep = std::chrono::milliseconds(1);

  // Others of this job have the core for less, but for large sums.
  static constexpr std::chrono::nanoseconds kCrowded = std::chrono::microseconds(500);
  static constexpr std::chrono::nanoseconds kCrowdedTime = std::chrono::milliseconds(100);

  static inline std::atomic<Clock::rep> crowded_until_{0}; // no yields till then: somebody had the core for so long

  const bool may_spin_;
  bool spins_;
  Clock::time_point spinning_since_;
  int polls_ = 0;
  std::chrono::nanoseconds sleep_ = kFirstSleep;
};

// How long a thread sleeps between looks at large data that rings no bell. Each sleep is a part of the time since the last news, so it is
// noticed little later than it could be, and what a link brings meanwhile comes in one piece. Where sleeps are too long for the link they
// become shorter: one is too long if several looks in a row find something after theirs.
class FlowPace {
 public:
  using Duration = std::chrono::nanoseconds;

  // A look has found something.
  void moved() {
    ++looks_;
  }
  // Nothing has moved, and the last news came so long ago: how long to sleep.
  Duration nap(Duration quiet) {
    longest_ = looks_ >= kManyLooks ? longest_ / 2 : longest_ * 2;
    longest_ = std::clamp(longest_, kShortest, kLongest);
    looks_ = 0;
    return std::clamp(quiet / kPart, kShortest, longest_);
  }

 private:
  static constexpr int kManyLooks = 4;
  static constexpr int kPart = 8;
  static constexpr Duration kShortest = std::chrono::microseconds(20);
  static constexpr Duration kLongest = std::chrono::milliseconds(1);

  int looks_ = 0; // since the last sleep
  Duration longest_ = kLongest;
};

} // namespace fog
