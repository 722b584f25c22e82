// The times of an operation's events. They are recorded only while there is an observer (a timeline, metrics), so other
// operations pay nothing.
#pragma once

#include <chrono>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include <c10/util/SmallVector.h>

#include "core/timeline.hpp"

namespace fog {

// The traffic of one rank with another, in the operations of one group.
struct PeerTraffic {
  uint64_t sent_messages = 0;
  uint64_t sent_bytes = 0; // of data
  uint64_t received_messages = 0;
  uint64_t received_bytes = 0;
  std::chrono::nanoseconds waited{0}; // from an operation's start to each message that came later
  std::chrono::nanoseconds waited_last{0}; // the part of it during which the messages of all other ranks were there
};

class Operation;

class OperationTimes {
 public:
  using Clock = std::chrono::steady_clock;

  explicit OperationTimes(Clock::time_point submitted) : submitted_(submitted), started_(submitted) {}

  void start() noexcept {
    started_ = Clock::now();
    if (Timeline::is_on()) {
      lane_ = Timeline::instance().take_lane(submitted_);
    }
  }
  // Call when a message of this group rank has come.
  std::chrono::nanoseconds arrive(int peer) {
    const auto now = Clock::now();
    arrivals_.emplace_back(peer, now);
    return now - started_;
  }
  // The rank whose message came last, and its distance from the message before it, or from the start; -1 if none came.
  std::pair<int, std::chrono::nanoseconds> last() const;
  // Call when an engine's thread has copied data, or computed, since `begin`.
  void ran(Clock::time_point begin, bool computed) noexcept {
    try {
      runs_.push_back({begin, Clock::now(), computed});
    } catch (const std::bad_alloc&) { // the timeline lacks it
    }
  }
  // Call when the operation has ended: adds it to the timeline.
  void end(const Operation& operation, bool failed);

 private:
  class Entry;
  struct Run {
    Clock::time_point begin;
    Clock::time_point end;
    bool computed;
  };

  Clock::time_point submitted_;
  Clock::time_point started_;
  c10::SmallVector<std::pair<int, Clock::time_point>, 4> arrivals_;
  c10::SmallVector<Run, 4> runs_;
  Timeline::Lane lane_;
};

} // namespace fog
