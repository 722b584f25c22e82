#include "engine/call_gaps.hpp"

#include <algorithm>
#include <cstdlib>

namespace fog {
namespace {

using Nanoseconds = CallGaps::Nanoseconds;
using Weighted = std::vector<std::pair<int64_t, int64_t>>; // values and weights

// The number of MADs above the median; for a normal distribution, four standard deviations.
constexpr int kDeviations = 6;

int64_t median(Weighted values) {
  std::sort(values.begin(), values.end());
  int64_t whole = 0;
  for (const auto& [value, weight] : values) {
    whole += weight;
  }
  int64_t part = 0;
  for (const auto& [value, weight] : values) {
    part += weight;
    if (2 * part >= whole) {
      return value;
    }
  }
  return 0;
}

} // namespace

Nanoseconds CallGaps::usual(const std::vector<Sample>& samples) {
  Weighted gaps;
  for (const auto& sample : samples) {
    gaps.emplace_back(sample.longest.count(), sample.period.count());
  }
  const auto middle = median(gaps);
  for (auto& [gap, weight] : gaps) {
    gap = std::abs(gap - middle);
  }
  return Nanoseconds(middle + kDeviations * median(gaps));
}

std::optional<Nanoseconds> CallGaps::call(Clock::time_point now) {
  const int64_t time = now.time_since_epoch().count();
  const int64_t last = last_.exchange(time, std::memory_order_relaxed);
  if (last == 0) {
    began_.store(time, std::memory_order_relaxed);
    return std::nullopt;
  }
  if (time - last > longest_.load(std::memory_order_relaxed)) { // a race of two threads may lose one of two long gaps
    longest_.store(time - last, std::memory_order_relaxed);
  }
  if (time - began_.load(std::memory_order_relaxed) < Nanoseconds(kPeriod).count()) {
    return std::nullopt;
  }
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) { // another thread ends the period
    return std::nullopt;
  }
  const Sample sample{Nanoseconds(longest_.exchange(0)), Nanoseconds(time - began_.exchange(time))};
  if (samples_.size() < kSamples) {
    samples_.push_back(sample);
  } else {
    samples_[next_++ % kSamples] = sample;
  }
  return usual(samples_);
}

} // namespace fog
