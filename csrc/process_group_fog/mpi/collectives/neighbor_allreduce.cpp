#include "neighbor_allreduce.hpp"

#include <algorithm>
#include <cstring>

#include "../../arithmetic.hpp"

namespace fog::mpi {

NeighborAllreduce::NeighborAllreduce(Signature signature, NeighborPlan plan, const void* in, void* out, size_t numel)
    : Operation(signature), plan_(std::move(plan)), in_(in), out_(out), numel_(numel) {}

void NeighborAllreduce::launch() {
  bytes_ = numel_ * c10::elementSize(static_cast<c10::ScalarType>(signature_.dtype));
  for (const auto& source : plan_.sources()) {
    receive_operand(source.rank, 0, bytes_);
  }
  std::vector<Destination> destinations;
  for (const auto& destination : plan_.destinations()) {
    destinations.push_back({destination.rank, destination.weight});
  }
  send(destinations, 0, in_, bytes_, true, in_ == out_ ? Memory::kOverwritten : Memory::kStays);
}

Operation::Action NeighborAllreduce::advance() {
  return use_operands(bytes_, in_ == out_ ? sent(bytes_) : bytes_);
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
  add({in_, 0, 0}, share * plan_.self_weight());
  auto* out = static_cast<char*>(out_);
  if (operands.empty()) {
    std::memset(out + used(), 0, usable() - used());
    return;
  }
  for_blocks(
      operands, item, used() / item, usable() / item, [&](const std::vector<const void*>& inputs, size_t begin, size_t count) {
        weighted_sum(dtype, out + begin * item, inputs, weights, mean, count);
      });
}

} // namespace fog::mpi
