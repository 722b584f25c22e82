// Whether a look at MPI moved data, told by how long it took.
//
// MPI says of a part that it has come, or gone, not that some of it has: over TCP a part of 4 MiB takes 34 ms on a link of 1 Gbit/s, and
// each look moves what has come meanwhile. One that finds nothing takes 0.5 to 1.6 us, one that moves anything 10 us and more.
#pragma once

#include <algorithm>
#include <chrono>

namespace fog::mpi {

class LookTimes {
 public:
  using Duration = std::chrono::steady_clock::duration;

  // Whether the look that took `time` has moved something.
  bool has_moved(Duration time) {
    const bool moved = time > kLonger * idle_;
    // It rises slowly, for what makes all looks longer: more requests, say. Or each of them would be taken for one that moves data.
    idle_ = std::min(time, idle_ + idle_ / kRise + Duration(1));
    return moved;
  }

 private:
  static constexpr int kLonger = 4;
  static constexpr int kRise = 1024;

  Duration idle_ = std::chrono::seconds(1); // what a look takes that moves nothing; falls at the first one
};

} // namespace fog::mpi
