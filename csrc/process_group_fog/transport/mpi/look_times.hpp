// Estimates from the duration of a look at MPI whether it moved data.
//
// MPI reports that a part has been received or sent as a whole, but not that some of it has. Over TCP a part of 4 MiB
// takes 34 ms on a link of 1 Gbit/s, and each look moves the bytes that have arrived meanwhile. A look without data
// takes 0.5 to 1.6 us, and a look that moves data 10 us or more.
#pragma once

#include <algorithm>
#include <chrono>

namespace fog::mpi {

class LookTimes {
 public:
  using Duration = std::chrono::steady_clock::duration;

  // Returns whether the look that took `time` has moved data.
  bool has_moved(Duration time) {
    const bool moved = time > kLonger * idle_;
    // The estimate rises slowly, to follow causes that make all looks longer, such as more requests. Otherwise each of
    // them would count as a look that moves data.
    idle_ = std::min(time, idle_ + idle_ / kRise + Duration(1));
    return moved;
  }

 private:
  static constexpr int kLonger = 4;
  static constexpr int kRise = 1024;

  Duration idle_ = std::chrono::seconds(1); // the duration of a look that moves nothing; falls at the first look
};

} // namespace fog::mpi
