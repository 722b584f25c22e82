// What a rank makes of its neighbors' tensors and its own.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include "core/neighbor_plan.hpp"
#include "transport/block.hpp"

namespace fog {

// What came from a source of the plan, and the weight it was sent with.
struct NeighborTerm {
  Input input;
  double scale;
};

// Elements `from` to `to` of out = sum over the plan's sources j of (my weight for j) * (j's weight for me) * x_j, in the
// plan's order, then + self_weight * own; with `mean` and senders' weights of 1, the plain mean. A term of weight 0 is left
// out, whatever its tensor holds: no edge, no influence, not even of a NaN. `terms` are in the order of the plan's sources;
// `out` may be `own`.
void neighbor_sum(
    const NeighborPlan& plan,
    c10::ScalarType dtype,
    void* out,
    c10::ArrayRef<NeighborTerm> terms,
    const void* own,
    size_t from,
    size_t to);

} // namespace fog
