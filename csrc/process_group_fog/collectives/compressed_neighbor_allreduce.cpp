#include "collectives/compressed_neighbor_allreduce.hpp"

namespace fog {

CompressedNeighborAllreduce::CompressedNeighborAllreduce(
    Signature signature, NeighborPlan plan, Encoding encoding, const void* in, void* out, size_t numel)
    : Operation(signature),
      plan_(std::move(plan)),
      sum_(encoding, static_cast<c10::ScalarType>(signature.dtype), numel),
      in_(in),
      out_(out) {
  phase_ = plan_.destinations().empty() && !encoding.decodes_own() ? Phase::kSum : Phase::kEncode;
}

void CompressedNeighborAllreduce::launch() {
  for (const auto& source : plan_.sources()) {
    receive_input(source.rank, 0, sum_.bytes());
  }
  if (phase_ == Phase::kEncode) {
    message_ = scratch(sum_.bytes());
  }
}

Operation::Action CompressedNeighborAllreduce::advance() {
  if (phase_ == Phase::kEncode) {
    return Action::kCompute; // outside of the engine's lock
  }
  if (phase_ == Phase::kSend) {
    phase_ = Phase::kSum;
    c10::SmallVector<Destination, 8> destinations;
    for (const auto& destination : plan_.destinations()) {
      destinations.push_back({destination.rank, destination.weight});
    }
    send(destinations, 0, message_, sum_.bytes(), true, Memory::kStays, Order::kAfterTheirs);
  }
  return use_inputs(sum_.bytes());
}

void CompressedNeighborAllreduce::compute() {
  if (phase_ == Phase::kEncode) {
    sum_.encode(in_, message_);
    phase_ = Phase::kSend;
    return;
  }
  c10::SmallVector<NeighborTerm, 2> terms;
  for (size_t i = 0; i < plan_.sources().size(); ++i) {
    terms.push_back({input(i), header(i).scale});
  }
  sum_.add(plan_, terms, in_, message_, out_, used(), usable());
}

} // namespace fog
