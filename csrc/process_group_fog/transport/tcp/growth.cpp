#include "transport/tcp/growth.hpp"

#include <algorithm>
#include <utility>

namespace fog::tcp {
namespace {

// A rate is measured over this many round trips, and this many seconds at least, as shorter times differ by chance. A new
// connection starts slowly: it takes about eight round trips to send at full rate. So the best of its first rates counts,
// whatever the others contain, such as a pause of the receiver.
constexpr double kRoundTrips = 4;
constexpr double kLeastTime = 0.05;
constexpr int kRates = 3;
// The rate with another connection must be this many times the one without.
constexpr double kGain = 1.15;
// A round trip of so many times the least one means that data waits in the link, which is full then.
constexpr double kQueue = 1.5;
// Between two attempts to connect.
constexpr auto kPause = std::chrono::seconds(1);

} // namespace

bool Growth::look(Clock::time_point now, uint64_t written, const Path& path) {
  const double time = std::chrono::duration<double>(now - std::exchange(since_, now)).count();
  const auto bytes = static_cast<double>(written - std::exchange(written_, written));
  const double limited = path.limited - std::exchange(limited_, path.limited);
  if (!std::exchange(measures_, true)) {
    return false;
  }
  const double least = std::max(kRoundTrips * path.least_round_trip, kLeastTime);
  if (time > least) { // the receiver's program has paused, and its buffer was full, whatever the path
    sum_ = {};
    return false;
  }
  sum_ = {sum_.time + time, sum_.bytes + bytes, sum_.limited + limited};
  if (sum_.time < least) {
    return false;
  }
  const auto sum = std::exchange(sum_, {});
  rate_ = sum.bytes / sum.time;
  if (judges_) {
    best_ = std::max(best_, rate_);
    if (++measured_ == kRates) {
      judges_ = false;
      is_enough_ = best_ < kGain * before_;
      used_ -= is_enough_ ? 1 : 0;
    }
    return false;
  }
  const bool is_limited = sum.limited > sum.time / 2 && path.round_trip < kQueue * path.least_round_trip;
  if (is_enough_ || !is_limited || used_ + 1 >= kMostConnections || now < asked_ + kPause) {
    return false;
  }
  before_ = rate_;
  asked_ = now;
  return true;
}

void Growth::on_open() {
  ++used_;
  judges_ = true;
  measured_ = 0;
  best_ = 0.0;
  measures_ = false;
  sum_ = {};
  asked_ = {};
}

} // namespace fog::tcp
