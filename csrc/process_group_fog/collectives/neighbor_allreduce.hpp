#pragma once

#include "core/neighbor_plan.hpp"
#include "engine/operation.hpp"

namespace fog {

// Computes out = neighbor_sum() of the sources' tensors and this rank's own; `out` may be `in`.
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

} // namespace fog
