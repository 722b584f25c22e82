// Deadlines computed from timeouts, without overflow.
#pragma once

#include <algorithm>
#include <chrono>

namespace fog {

using Deadline = std::chrono::steady_clock::time_point;

// Returns the sum, or the largest number of milliseconds on overflow.
inline std::chrono::milliseconds saturating_add(std::chrono::milliseconds timeout, std::chrono::milliseconds more) {
  return timeout > std::chrono::milliseconds::max() - more ? std::chrono::milliseconds::max() : timeout + more;
}

// Converts to nanoseconds; returns the largest number of them on overflow (292 years).
inline std::chrono::nanoseconds saturating_nanoseconds(std::chrono::milliseconds timeout) {
  using Nanoseconds = std::chrono::nanoseconds;
  return timeout > std::chrono::floor<std::chrono::milliseconds>(Nanoseconds::max()) ? Nanoseconds::max() : Nanoseconds(timeout);
}

// Returns now + timeout, or the clock's last time point on overflow (it counts nanoseconds, which last 292 years).
inline Deadline deadline_after(std::chrono::milliseconds timeout) {
  const auto now = std::chrono::steady_clock::now();
  return timeout >= std::chrono::floor<std::chrono::milliseconds>(Deadline::max() - now) ? Deadline::max() : now + timeout;
}

// Limits a timeout for torch's own waits, which compute with it and may overflow. 20 days in milliseconds fit into an
// int.
inline std::chrono::milliseconds for_torch(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(20 * 24));
}

} // namespace fog
