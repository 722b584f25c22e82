#include "collectives/neighbor_allreduce.hpp"

#include "collectives/neighbor_sum.hpp"

namespace fog {

NeighborAllreduce::NeighborAllreduce(Signature signature, NeighborPlan plan, const void* in, void* out, size_t numel)
    : Operation(signature), plan_(std::move(plan)), in_(in), out_(out), numel_(numel) {}

void NeighborAllreduce::launch() {
  bytes_ = numel_ * c10::elementSize(static_cast<c10::ScalarType>(signature_.dtype));
  for (const auto& source : plan_.sources()) {
    receive_input(source.rank, 0, bytes_);
  }
  c10::SmallVector<Destination, 8> destinations;
  for (const auto& destination : plan_.destinations()) {
    destinations.push_back({destination.rank, destination.weight});
  }
  send(destinations, 0, in_, bytes_, true, in_ == out_ ? Memory::kOverwritten : Memory::kStays);
}

Operation::Action NeighborAllreduce::advance() {
  return use_inputs(bytes_, in_ == out_ ? sent(bytes_) : bytes_);
}

void NeighborAllreduce::compute() {
  const auto dtype = static_cast<c10::ScalarType>(signature_.dtype);
  const size_t item = c10::elementSize(dtype);
  c10::SmallVector<NeighborTerm, 2> terms;
  for (size_t i = 0; i < plan_.sources().size(); ++i) {
    terms.push_back({input(i), header(i).scale});
  }
  neighbor_sum(plan_, dtype, out_, terms, in_, used() / item, usable() / item);
}

} // namespace fog
