#include "collectives/neighbor_sum.hpp"

#include <cstring>
#include <vector>

#include <c10/util/SmallVector.h>

#include "core/arithmetic.hpp"
#include "core/neighbor_plan.hpp"

namespace fog {

void neighbor_sum(
    const NeighborPlan& plan,
    c10::ScalarType dtype,
    void* out,
    c10::ArrayRef<NeighborTerm> terms,
    const void* own,
    size_t from,
    size_t to) {
  const size_t item = c10::elementSize(dtype);
  c10::SmallVector<double, 8> scales;
  for (const auto& term : terms) {
    scales.push_back(term.scale);
  }
  const NeighborWeights weights(plan, scales);
  std::vector<Input> inputs;
  for (const size_t source : weights.sources) {
    inputs.push_back(terms[source].input);
  }
  if (weights.own) {
    inputs.push_back({own, {}});
  }
  auto* result = static_cast<char*>(out);
  if (inputs.empty()) {
    std::memset(result + from * item, 0, (to - from) * item);
    return;
  }
  for_pieces(inputs, item, from, to, [&](const std::vector<const void*>& where, size_t begin, size_t count) {
    weighted_sum(dtype, result + begin * item, where, weights.weights, weights.mean, count);
  });
}

} // namespace fog
