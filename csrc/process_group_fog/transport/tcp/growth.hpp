// Finds out how many connections fill the link to a peer.
//
// One connection has at most as much in flight as the system's buffers hold, which on a long path with much bandwidth is
// less than the path does. So while data waits and everything that the buffers may hold is in flight, another connection is
// asked for; it is used from then on only if the rate of all of them has clearly grown. Data that is sent in short times,
// as by a training loop, counts together: four round trips in which data has waited make one measurement.
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
  // Data has waited since begin(), and all connections have written so many bytes by now. Returns whether to ask for
  // another connection.
  bool look(Clock::time_point now, uint64_t written, const Path& path);
  // An additional connection is open.
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
  struct Sum {
    double time = 0.0; // in which data has waited
    double bytes = 0.0;
    double limited = 0.0; // the time in which all that the first connection may hold was in flight
  };

  bool measures_ = false;
  Clock::time_point since_;
  uint64_t written_ = 0; // at that time, as the next one
  double limited_ = 0.0;
  Sum sum_;
  double rate_ = 0.0;
  double before_ = 0.0; // the rate without the newest connection
  size_t used_ = 0;
  bool judges_ = false; // whether the newest connection is of use is not known yet
  int measured_ = 0; // times since that is open
  double best_ = 0.0; // of these rates
  bool is_enough_ = false;
  Clock::time_point asked_;
};

} // namespace fog::tcp
