#include "collectives/neighbor_sum.hpp"

#include <algorithm>
#include <cstring>

#include <c10/util/SmallVector.h>

#include "core/arithmetic.hpp"

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
  const bool mean = plan.mean() && std::all_of(terms.begin(), terms.end(), [](const NeighborTerm& term) { return term.scale == 1.0; });
  const double share = plan.mean() ? 1.0 / static_cast<double>(terms.size() + 1) : 1.0;
  std::vector<Input> inputs;
  c10::SmallVector<double, 8> weights; // not used for the mean
  auto add = [&](const Input& input, double weight) {
    if (mean || weight != 0.0) {
      inputs.push_back(input);
      weights.push_back(weight);
    }
  };
  for (size_t i = 0; i < terms.size(); ++i) {
    add(terms[i].input, share * plan.sources()[i].weight * terms[i].scale);
  }
  add({own, {}}, share * plan.self_weight());
  auto* result = static_cast<char*>(out);
  if (inputs.empty()) {
    std::memset(result + from * item, 0, (to - from) * item);
    return;
  }
  for_pieces(inputs, item, from, to, [&](const std::vector<const void*>& where, size_t begin, size_t count) {
    weighted_sum(dtype, result + begin * item, where, weights, mean, count);
  });
}

} // namespace fog
