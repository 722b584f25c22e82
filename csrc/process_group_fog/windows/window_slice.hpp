// A window's operation in the timeline.
#pragma once

#include <string>
#include <vector>

#include "core/timeline.hpp"

namespace fog {

class WindowSlice {
 public:
  // Begins now, if there is a timeline.
  WindowSlice();
  ~WindowSlice();
  WindowSlice(const WindowSlice&) = delete;
  WindowSlice& operator=(const WindowSlice&) = delete;

  // Adds an exchange of `bytes` with another rank.
  void add(int rank, size_t bytes) {
    if (lane_.number >= 0) {
      ranks_.push_back(rank);
      bytes_ += bytes;
    }
  }
  // Ends the slice; `name` must live forever.
  void end(const char* name, const std::string& group, const std::string& window, bool failed) noexcept;

 private:
  class Entry;
  void give_lane_back() noexcept;

  Timeline::Clock::time_point begun_;
  Timeline::Lane lane_;
  std::vector<int> ranks_;
  size_t bytes_ = 0;
};

} // namespace fog
