// When an operation did what: kept while somebody observes (a timeline, metrics), so that others cost nothing.
#pragma once

#include <chrono>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include <c10/util/SmallVector.h>

#include "core/timeline.hpp"

namespace fog {

// What one rank has exchanged with another, in the operations of one group.
struct PeerTraffic {
  uint64_t sent_messages = 0;
  uint64_t sent_bytes = 0; // of data
  uint64_t received_messages = 0;
  uint64_t received_bytes = 0;
  std::chrono::nanoseconds waited{0}; // from an operation's start to each message that was not there yet
  std::chrono::nanoseconds waited_last{0}; // of that, while all others' messages were there
};

class Operation;

class OperationTimes {
 public:
  using Clock = std::chrono::steady_clock;

  explicit OperationTimes(Clock::time_point submitted) : submitted_(submitted), started_(submitted) {}
  ~OperationTimes();
  OperationTimes(const OperationTimes&) = delete;
  OperationTimes& operator=(const OperationTimes&) = delete;

  void start() noexcept {
    started_ = Clock::now();
    if (Timeline::is_on()) {
      lane_ = Timeline::instance().take_lane(submitted_);
    }
  }
  // A message of that group rank has come.
  std::chrono::nanoseconds arrive(int peer) {
    const auto now = Clock::now();
    arrivals_.emplace_back(peer, now);
    return now - started_;
  }
  // The rank whose message came last, and how long after the one before, or after the start; -1 if none came.
  std::pair<int, std::chrono::nanoseconds> last() const;
  // The engine's threads have copied data from `begin` on, or computed.
  void ran(Clock::time_point begin, bool computed) noexcept {
    try {
      runs_.push_back({begin, Clock::now(), computed});
    } catch (const std::bad_alloc&) { // it is missing in the timeline
    }
  }
  // It has ended: what is known of it goes into the timeline.
  void end(const Operation& operation, bool failed);

 private:
  class Entry;
  void give_lane_back() noexcept;
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
