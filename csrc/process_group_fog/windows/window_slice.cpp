#include "windows/window_slice.hpp"

#include <new>
#include <utility>

#include <c10/util/StringUtil.h>

namespace fog {

class WindowSlice::Entry final : public Timeline::Entry {
 public:
  Entry(const char* name, std::string_view arguments, Timeline::Clock::time_point begun)
      : name_(name), arguments_(Timeline::text(arguments)), begun_(begun), ended_(Timeline::Clock::now()) {}

  void write(Timeline::Writer& writer) const override {
    writer.slice(name_, "window", begun_, ended_, arguments_);
  }

 private:
  const char* const name_;
  const Timeline::Text arguments_;
  const Timeline::Clock::time_point begun_;
  const Timeline::Clock::time_point ended_;
};

WindowSlice::WindowSlice() {
  if (Timeline::is_on()) {
    begun_ = Timeline::Clock::now();
    lane_ = Timeline::instance().take_lane(begun_);
  }
}

WindowSlice::~WindowSlice() {
  give_lane_back();
}

void WindowSlice::give_lane_back() noexcept {
  if (lane_.number >= 0) {
    Timeline::instance().return_lane(lane_, Timeline::Clock::now());
    lane_ = {};
  }
}

void WindowSlice::end(const char* name, const std::string& group, const std::string& window, bool failed) noexcept {
  if (lane_.number >= 0 && Timeline::is_on()) {
    try {
      Timeline::instance().add(
          lane_,
          std::make_unique<Entry>(
              name,
              c10::str(
                  "\"group\": ", json_string(group), ", \"window\": ", json_string(window), ", \"ranks\": [", c10::Join(", ", ranks_),
                  "], \"bytes\": ", bytes_, failed ? ", \"failed\": true" : ""),
              begun_));
    } catch (const std::bad_alloc&) { // it is missing in the timeline
    }
  }
  give_lane_back();
}

} // namespace fog
