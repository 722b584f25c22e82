#include "neighbor_allreduce.hpp"

#include <algorithm>
#include <cstring>

#include "../../arithmetic.hpp"

namespace fog::mpi {

NeighborAllreduce::NeighborAllreduce(Signature signature, NeighborPlan plan, const void* in, void* out, size_t numel)
    : Operation(signature), plan_(std::move(plan)), in_(in), out_(out), numel_(numel) {}

void NeighborAllreduce::launch() {
  const size_t bytes = numel_ * c10::elementSize(static_cast<c10::ScalarType>(signature_.dtype));
  auto* place = static_cast<char*>(scratch(bytes * plan_.sources().size()));
  for (const auto& source : plan_.sources()) {
    receive(source.rank, 0, place, bytes);
    arrived_.push_back(place);
    place += bytes;
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
  const size_t sources = arrived_.size();
  bool mean = plan_.mean();
  for (size_t i = 0; i < sources; ++i) {
    mean = mean && header(i).scale == 1.0;
  }
  if (mean) {
    auto inputs = arrived_;
    inputs.push_back(in_);
    weighted_sum(dtype, out_, inputs, {}, true, numel_);
    return;
  }
  const double share = plan_.mean() ? 1.0 / static_cast<double>(sources + 1) : 1.0;
  std::vector<const void*> inputs;
  std::vector<double> weights;
  auto add = [&](const void* input, double weight) {
    if (weight != 0.0) {
      inputs.push_back(input);
      weights.push_back(weight);
    }
  };
  for (size_t i = 0; i < sources; ++i) {
    add(arrived_[i], share * plan_.sources()[i].weight * header(i).scale);
  }
  add(in_, share * plan_.self_weight());
  if (inputs.empty()) {
    std::memset(out_, 0, numel_ * c10::elementSize(dtype));
    return;
  }
  weighted_sum(dtype, out_, inputs, weights, false, numel_);
}

} // namespace fog::mpi
