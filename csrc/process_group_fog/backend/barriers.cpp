// barrier and monitoredBarrier.
#include "backend/process_group_fog.hpp"

#include <ATen/DeviceAccelerator.h>
#include <c10/util/Exception.h>

#include "core/deadline.hpp"
#include "collectives/barrier.hpp"
#include "collectives/monitored_barrier.hpp"

namespace fog {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

namespace {

// The errors below begin with the words that scripts know from Gloo.

// Rank 0 alone knows who is missing. The others, whose time ends at about the same moment, give its report this much
// longer before they speak for themselves.
constexpr auto kReportTime = std::chrono::milliseconds(1000);

// "Ranks 1, 3"
std::string name_ranks(const std::vector<int>& ranks, bool all) {
  std::string text = all ? "Ranks " : "Rank ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return text;
}

} // namespace

WorkPtr ProcessGroupFog::barrier(const c10d::BarrierOptions& options) {
  // Of a device only where the program names one, on all ranks alike: one that torch guesses may not be named by all, and a delegate
  // would wait for those for ever. torch's dispatch passes `device_ids` on, but not `device`.
  auto given = options;
  if (const auto bound = getBoundDeviceId()) {
    given.device = bound;
  } else if (options.device_ids.empty()) {
    given.device.reset();
  } else if (const auto type = at::getAccelerator(); type && !options.device) {
    given.device = at::Device(*type, static_cast<c10::DeviceIndex>(options.device_ids[0]));
  }
  if (given.device && !given.device->is_cpu()) {
    if (const auto delegate = device_backends_.serving("barrier", *given.device)) {
      return delegate->barrier(given);
    }
  }
  return submit(std::make_shared<Barrier>(), {OpType::BARRIER, "fog:barrier", {}, {}}, call_options(options));
}

void ProcessGroupFog::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  TORCH_CHECK_VALUE(
      options.timeout == c10d::kUnsetTimeout || options.timeout > kNoTimeout, "monitored_barrier: timeout: got ",
      options.timeout.count(), " ms; allowed is more than 0");
  const auto timeout = options.timeout > kNoTimeout ? options.timeout : options_->timeout;
  const auto operation = std::make_shared<MonitoredBarrier>();
  const auto work = submit(
      operation, {OpType::BARRIER, "fog:monitored_barrier", {}, {}},
      call_options(rank_ == 0 ? timeout : saturating_add(timeout, kReportTime)));
  try {
    work->wait();
  } catch (const c10::DistBackendError& error) {
    if (rank_ != 0) {
      C10_THROW_ERROR(
          DistBackendError,
          c10::str(
              "Rank ", rank_,
              " successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0 of group '",
              group_->name, "': ", error.what_without_backtrace()));
    }
    std::vector<int> missing;
    for (int peer = 1; peer < size_ && (wait_all_ranks || missing.empty()); ++peer) {
      if (!operation->heard_from(peer)) {
        missing.push_back(peer);
      }
    }
    if (missing.empty()) {
      throw;
    }
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            name_ranks(missing, wait_all_ranks), " failed to pass monitoredBarrier in ", timeout.count(),
            " ms: ", error.what_without_backtrace()));
  }
}

} // namespace fog
