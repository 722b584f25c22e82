// Deadlines computed from timeouts, without overflow.
#pragma once

#include <algorithm>
#include <chrono>

namespace fog {

using Deadline = std::chrono::steady_clock::time_point;

// A longer timeout counts as this one, so that sums and differences with times do not overflow: the clock counts
// nanoseconds, which last 292 years. fog_pg/_timeouts.py has the same limit.
inline std::chrono::milliseconds within_reach(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 36'500));
}

inline Deadline deadline_after(std::chrono::milliseconds timeout) {
  return std::chrono::steady_clock::now() + within_reach(timeout);
}

// Limits a timeout for torch's own waits, which compute with it and may overflow. 20 days in milliseconds fit into an
// int.
inline std::chrono::milliseconds for_torch(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(20 * 24));
}

} // namespace fog
