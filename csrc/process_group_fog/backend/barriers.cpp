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

// The errors below begin with the same words as Gloo's, which scripts may match.

// Only rank 0 knows the missing ranks. The timeouts of the other ranks end at about the same time: they wait this much
// longer for rank 0's report before they report their own error.
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
  // Use a device only if the program names one, alike on all ranks: torch may guess a device on some ranks only, and
  // the delegate would then wait forever for the others. torch's dispatch passes `device_ids` on, but not `device`.
  auto given = options;
  if (const auto bound = getBoundDeviceId()) {
    given.device = bound;
  } else if (options.device_ids.empty()) {
    given.device.reset();
  } else if (const auto type = at::getAccelerator(); type && !options.device) {
    given.device = at::Device(*type, static_cast<c10::DeviceIndex>(options.device_ids[0]));
  }
  if (given.device && !given.device->is_cpu()) {
    if (const auto delegate = device_backends_->serving("barrier", *given.device)) {
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
      call_options(rank_ == 0 ? timeout : within_reach(timeout) + kReportTime));
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
