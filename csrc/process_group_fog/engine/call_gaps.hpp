// What this process's program usually takes between two calls of fog.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace fog {

// A sample is the longest gap between two calls of a period of a second or more, so the many small gaps within a step
// do not hide the one in which the program computes. Any thread may call.
class CallGaps {
 public:
  using Clock = std::chrono::steady_clock;
  using Nanoseconds = std::chrono::nanoseconds;
  struct Sample {
    Nanoseconds longest; // gap
    Nanoseconds period;
  };

  // The program calls. Returns the new usual gap if a period has ended.
  std::optional<Nanoseconds> call(Clock::time_point now);
  // The program goes on after a wait in fog, which was not its own time.
  void resume(Clock::time_point now) {
    last_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  }
  // The time of the last call.
  Clock::time_point last() const {
    return Clock::time_point(Clock::duration(last_.load(std::memory_order_relaxed)));
  }

  // Returns median + 6 MAD of the samples, each weighted by its period: of the gaps that a random moment falls into.
  static Nanoseconds usual(const std::vector<Sample>& samples);

 private:
  static constexpr auto kPeriod = std::chrono::seconds(1);
  static constexpr size_t kSamples = 32;

  std::atomic<int64_t> last_{0}; // 0: no call yet
  std::atomic<int64_t> longest_{0}; // of this period
  std::atomic<int64_t> began_{0}; // the period
  std::mutex mutex_; // guards the samples
  std::vector<Sample> samples_; // the last ones, in no order
  size_t next_ = 0;
};

} // namespace fog
