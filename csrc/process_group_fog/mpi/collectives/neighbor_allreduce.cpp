#include "neighbor_allreduce.hpp"

#include <algorithm>
#include <cstring>

#include "../../arithmetic.hpp"

namespace fog::mpi {

NeighborAllreduce::NeighborAllreduce(Signature signature, NeighborPlan plan, const void* in, void* out, size_t numel)
    : Operation(signature), plan_(std::move(plan)), in_(in), out_(out), numel_(numel) {}

void NeighborAllreduce::launch() {
  const size_t bytes = numel_ * c10::elementSize(static_cast<c10::ScalarType>(signature_.dtype));
  for (const auto& source : plan_.sources()) {
    receive_operand(source.rank, 0, bytes);
  }
  for (const auto& destination : plan_.destinations()) {
    send(destination.rank, 0, in_, bytes, destination.weight, true);
  }
}

Operation::Action NeighborAllreduce::advance() {
  if (combined_) {
    return Action::kDone;
  }
  if (!received(0)) {
    return Action::kWait;
  }
  combined_ = true;
  return Action::kCompute;
}

void NeighborAllreduce::compute() {
  const auto dtype = static_cast<c10::ScalarType>(signature_.dtype);
  const size_t item = c10::elementSize(dtype);
  const size_t sources = plan_.sources().size();
  bool mean = plan_.mean();
  for (size_t i = 0; i < sources; ++i) {
    mean = mean && header(i).scale == 1.0;
  }
  const double share = plan_.mean() ? 1.0 / static_cast<double>(sources + 1) : 1.0;
  std::vector<Operand> operands;
  std::vector<double> weights; // unused for the mean
  auto add = [&](const Operand& operand, double weight) {
    if (mean || weight != 0.0) {
      operands.push_back(operand);
      weights.push_back(weight);
    }
  };
  for (size_t i = 0; i < sources; ++i) {
    add(operand(i), share * plan_.sources()[i].weight * header(i).scale);
  }
  add({in_, 0}, share * plan_.self_weight());
  if (operands.empty()) {
    std::memset(out_, 0, numel_ * item);
    return;
  }
  for_blocks(operands, item, numel_, [&](const std::vector<const void*>& inputs, size_t begin, size_t count) {
    weighted_sum(dtype, static_cast<char*>(out_) + begin * item, inputs, weights, mean, count);
  });
}

} // namespace fog::mpi
