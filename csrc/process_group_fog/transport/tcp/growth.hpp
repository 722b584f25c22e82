// Finds out how many connections fill the link to a peer.
//
// One connection has at most as much in flight as the system's buffers hold, which on a long path with much bandwidth is
// less than the path does. So while data waits and everything that the buffers may hold is in flight, another connection is
// asked for; it is used from then on only if the rate of all of them has clearly grown.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "transport/tcp/connections.hpp"

namespace fog::tcp {

class Growth {
 public:
  using Clock = std::chrono::steady_clock;

  // Data begins to wait, so the time before does not count.
  void begin() {
    measures_ = false;
  }
  // Data has waited since begin(), and so many bytes were written by all connections. Returns whether to ask for another
  // connection, of at most `most`.
  bool look(Clock::time_point now, uint64_t written, const Path& path, size_t most);
  // An additional connection is open. begin() is not needed.
  void on_open();

  // Returns how many additional connections to use.
  size_t used() const {
    return used_;
  }
  // Returns the bytes per second of all connections when it was measured last.
  double rate() const {
    return rate_;
  }

 private:
  // Returns whether the path, and not the link, was the limit in this time.
  bool is_limited(const Path& path, double time) const;

  bool measures_ = false;
  Clock::time_point since_;
  uint64_t written_ = 0; // at that time, as the next one
  double limited_ = 0.0;
  double rate_ = 0.0;
  double before_ = 0.0; // the rate without the newest connection
  size_t used_ = 0;
  bool judges_ = false; // whether the newest connection is of use is not known yet
  int measured_ = 0; // times since that is open
  bool is_enough_ = false;
  Clock::time_point asked_;
};

} // namespace fog::tcp
