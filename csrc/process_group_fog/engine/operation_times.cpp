#include "engine/operation_times.hpp"

#include <map>

#include <c10/util/StringUtil.h>

#include "engine/group.hpp"
#include "engine/operation.hpp"

namespace fog {
namespace {

std::string microseconds(std::chrono::nanoseconds time) {
  const auto tenths = time.count() / 100;
  return std::to_string(tenths / 10) + '.' + std::to_string(tenths % 10);
}

} // namespace

// An operation in the timeline: a slice that contains its phases.
class OperationTimes::Entry final : public Timeline::Entry {
 public:
  Entry(const OperationTimes& times, const Operation& operation, bool failed)
      : signature_(operation.signature()),
        group_(operation.group()),
        sequence_(operation.sequence()),
        key_(operation.key()),
        use_(operation.use().number),
        failed_(failed),
        submitted_(times.submitted_),
        started_(times.started_),
        ended_(Clock::now()),
        arrivals_(times.arrivals_),
        runs_(times.runs_) {}

  void write(Timeline::Writer& writer) const override {
    std::string waits;
    std::map<int, Clock::time_point> latest; // by rank
    for (const auto& [peer, time] : arrivals_) {
      auto& known = latest[peer];
      known = std::max(known, time);
    }
    for (const auto& [peer, time] : latest) {
      waits += (waits.empty() ? "" : ", ") + json_string(std::to_string(group_->members[peer].peer_id)) + ": " +
          microseconds(time - started_);
    }
    std::string arguments = c10::str(
        "\"group\": ", json_string(group_->name), ", \"number\": ", sequence_, ", \"what\": ", json_string(signature_.describe()),
        ", \"queued_us\": ", microseconds(started_ - submitted_), ", \"wait_us\": {", waits, "}");
    if (signature_.kind != OpKind::kPointToPoint) { // which has a tag, but no place in the program order
      arguments += ", \"key\": " + json_string(c10::str(group_->id, ':', key_, ':', use_)); // the same on all ranks
    }
    if (failed_) {
      arguments += ", \"failed\": true";
    }
    writer.slice(name_of(signature_.kind), "operation", submitted_, ended_, arguments);
    if (started_ > submitted_) {
      writer.slice("queued", "phase", submitted_, started_);
    }
    for (const auto& run : runs_) {
      writer.slice(run.computed ? "combined" : "moved", "phase", run.begin, std::min(run.end, ended_));
    }
  }

 private:
  const Signature signature_;
  const std::shared_ptr<const Group> group_;
  const uint64_t sequence_;
  const uint64_t key_;
  const uint16_t use_;
  const bool failed_;
  const Clock::time_point submitted_;
  const Clock::time_point started_;
  const Clock::time_point ended_;
  const c10::SmallVector<std::pair<int, Clock::time_point>, 4> arrivals_;
  const c10::SmallVector<Run, 4> runs_;
};

std::pair<int, std::chrono::nanoseconds> OperationTimes::last() const {
  if (arrivals_.empty()) {
    return {-1, std::chrono::nanoseconds(0)};
  }
  const auto& [peer, time] = arrivals_.back();
  const auto before = arrivals_.size() > 1 ? arrivals_[arrivals_.size() - 2].second : started_;
  return {peer, time - before};
}

void OperationTimes::end(const Operation& operation, bool failed) {
  if (lane_ && Timeline::is_on()) {
    Timeline::instance().add(lane_, std::make_unique<Entry>(*this, operation, failed));
  }
  lane_.give_back();
}

} // namespace fog
