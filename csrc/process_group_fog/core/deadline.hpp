// Points in time that a timeout leads to.
#pragma once

#include <algorithm>
#include <chrono>

namespace fog {

using Deadline = std::chrono::steady_clock::time_point;

// The sum, or the largest number of milliseconds where that is out of reach.
inline std::chrono::milliseconds saturating_add(std::chrono::milliseconds timeout, std::chrono::milliseconds more) {
  return timeout > std::chrono::milliseconds::max() - more ? std::chrono::milliseconds::max() : timeout + more;
}

// The same in nanoseconds, or the most of these (292 years).
inline std::chrono::nanoseconds saturating_nanoseconds(std::chrono::milliseconds timeout) {
  using Nanoseconds = std::chrono::nanoseconds;
  return timeout > std::chrono::floor<std::chrono::milliseconds>(Nanoseconds::max()) ? Nanoseconds::max() : Nanoseconds(timeout);
}

// Now + timeout, or the end of time where the clock, which counts nanoseconds, does not reach that far (292 years).
inline Deadline deadline_after(std::chrono::milliseconds timeout) {
  const auto now = std::chrono::steady_clock::now();
  return timeout >= std::chrono::floor<std::chrono::milliseconds>(Deadline::max() - now) ? Deadline::max() : now + timeout;
}

// What torch's own waits can take, which compute with it and have no such care: 20 days in milliseconds are still an int.
inline std::chrono::milliseconds for_torch(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(20 * 24));
}

} // namespace fog
