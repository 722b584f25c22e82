#pragma once

#include "../../neighbor_plan.hpp"
#include "../operation.hpp"

namespace fog::mpi {

// out = sum over the plan's sources j of (my weight for j) * (j's weight for me) * x_j, in the plan's order, then
// + self_weight * x; with `mean` and senders' weights of 1, the plain mean. A term of weight 0 is left out, whatever its
// tensor holds: no edge, no influence, not even of a NaN. `out` may be `in`.
class NeighborAllreduce : public Operation {
 public:
  NeighborAllreduce(Signature signature, NeighborPlan plan, const void* in, void* out, size_t numel);

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  const NeighborPlan plan_;
  const void* const in_;
  void* const out_;
  const size_t numel_;
  size_t bytes_ = 0;
};

} // namespace fog::mpi
