// barrier and monitoredBarrier.
#include "process_group_fog.hpp"

#include "mpi/collectives/barrier.hpp"

namespace fog {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

WorkPtr ProcessGroupFog::barrier(const c10d::BarrierOptions& options) {
  return submit(std::make_shared<mpi::Barrier>(), {OpType::BARRIER, "fog:barrier", {}, {}}, call_options(options.timeout));
}

} // namespace fog
