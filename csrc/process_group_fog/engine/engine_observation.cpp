// The engine's records for observers: the timeline, metrics, the flight record, and warnings about long waits.
#include <ATen/record_function.h>
#include <c10/util/Logging.h>
#include <c10/util/StringUtil.h>

#include "core/settings.hpp"
#include "engine/engine.hpp"

namespace fog {
namespace {

constexpr auto kNoteInterval = std::chrono::seconds(1);

} // namespace

void Engine::record_to(std::unique_ptr<FlightRecord> record) {
  const auto lock = locked();
  if (!record_) {
    record_ = std::move(record);
  }
}

std::unordered_map<int, PeerTraffic> Engine::traffic(const std::shared_ptr<Group>& group) {
  const auto lock = locked();
  return group->traffic;
}

void Engine::note_wait(Operation& operation, Deadline now) {
  const auto begun = operation.deadline() - operation.timeout();
  if (operation.computing || now < begun + kNoteInterval || now < operation.next_note) {
    return;
  }
  operation.next_note = now + kNoteInterval;
  if (record_) {
    note_awaited(operation);
  }
  const auto patience = std::chrono::seconds(settings().warn_after);
  if (patience.count() > 0 && !operation.warned && now >= begun + patience) {
    operation.warned = true;
    LOG(WARNING) << "fog: " << operation.describe() << " has waited " << patience.count() << " s" << operation.describe_awaited();
  }
}

void Engine::note_awaited(const Operation& operation) {
  const auto& members = operation.group()->members;
  const auto& own_host = members[operation.group()->rank].host_id;
  const auto awaited = operation.awaited();
  std::vector<FlightRecord::Awaited> first;
  for (const int rank : awaited) {
    if (first.size() < FlightRecord::kNamed) {
      first.push_back({rank, members[rank].host_id == own_host ? members[rank].pid : 0});
    }
  }
  record_->wait(operation.flight, first, awaited.size());
}

void Engine::run_profiled(Operation& operation, bool computes) {
  // torch's profiler observes the threads that it was started on, and a thread that waits for an operation also drives
  // the engine. The profiler's callbacks are not passed on to other threads: at its end the profiler frees its events,
  // even while an operation runs.
  at::RecordFunction range(at::RecordScope::USER_SCOPE);
  if (range.isActive()) {
    range.before(c10::str("fog:", name_of(operation.signature().kind), computes ? " combined" : " moved"));
  }
  operation.run();
}

void Engine::end_times(Operation& operation, bool failed) {
  const auto& group = operation.group();
  try {
    const auto [peer, time] = operation.times->last();
    if (peer >= 0) {
      group->traffic[peer].waited_last += time;
    }
    operation.times->end(operation, failed);
  } catch (const std::bad_alloc&) { // the observations lack this operation
  }
}

} // namespace fog
