#include "collectives/neighbor_sum.hpp"

#include <algorithm>
#include <cstring>

#include "core/arithmetic.hpp"

namespace fog {

void neighbor_sum(
    const NeighborPlan& plan,
    c10::ScalarType dtype,
    void* out,
    const std::vector<NeighborTerm>& terms,
    const void* own,
    size_t from,
    size_t to) {
  const size_t item = c10::elementSize(dtype);
  const bool mean = plan.mean() && std::all_of(terms.begin(), terms.end(), [](const NeighborTerm& term) { return term.scale == 1.0; });
  const double share = plan.mean() ? 1.0 / static_cast<double>(terms.size() + 1) : 1.0;
  std::vector<Operand> operands;
  std::vector<double> weights; // unused for the mean
  auto add = [&](const Operand& operand, double weight) {
    if (mean || weight != 0.0) {
      operands.push_back(operand);
      weights.push_back(weight);
    }
  };
  for (size_t i = 0; i < terms.size(); ++i) {
    add(terms[i].operand, share * plan.sources()[i].weight * terms[i].scale);
  }
  add({own, 0, 0}, share * plan.self_weight());
  auto* result = static_cast<char*>(out);
  if (operands.empty()) {
    std::memset(result + from * item, 0, (to - from) * item);
    return;
  }
  for_blocks(operands, item, from, to, [&](const std::vector<const void*>& inputs, size_t begin, size_t count) {
    weighted_sum(dtype, result + begin * item, inputs, weights, mean, count);
  });
}

} // namespace fog
