#include "collectives/gather_concat.hpp"

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>

#include "core/copy.hpp"

namespace fog {

GatherConcat::GatherConcat(Signature signature, at::Tensor tensor, std::vector<int> sources, std::vector<int> destinations)
    : Operation(signature), tensor_(std::move(tensor)), sources_(std::move(sources)), destinations_(std::move(destinations)) {}

void GatherConcat::launch() {
  for (const int source : sources_) {
    if (source != rank()) {
      receive_header(source, 0);
    }
  }
  std::vector<Destination> destinations;
  for (const int destination : destinations_) {
    if (destination != rank()) {
      destinations.push_back({destination});
    }
  }
  send(destinations, 0, tensor_.const_data_ptr(), tensor_.nbytes(), true);
}

Operation::Action GatherConcat::advance() {
  if (!received(0)) {
    return Action::kWait;
  }
  switch (phase_) {
    case Phase::kHeaders:
      phase_ = Phase::kAllocated;
      return Action::kCompute;
    case Phase::kAllocated: {
      phase_ = Phase::kData;
      size_t receive = 0;
      for (size_t i = 0; i < sources_.size(); ++i) {
        if (sources_[i] != rank()) {
          fetch(receive++, places_[i]);
        }
      }
      return received(0) ? Action::kDone : Action::kWait;
    }
    case Phase::kData:
      break;
  }
  return Action::kDone;
}

void GatherConcat::compute() {
  size_t total = 0;
  size_t receive = 0;
  std::vector<size_t> bytes;
  for (const int source : sources_) {
    const bool is_own = source == rank();
    bytes.push_back(is_own ? tensor_.nbytes() : header(receive).bytes);
    signatures_.push_back(is_own ? signature_ : header(receive).operation.signature);
    receive += is_own ? 0 : 1;
    total += bytes.back();
  }
  auto sizes = tensor_.sizes().vec();
  int64_t row = static_cast<int64_t>(tensor_.element_size());
  for (size_t dim = 1; dim < sizes.size(); ++dim) {
    row *= sizes[dim];
  }
  int64_t first = 0;
  for (const auto& signature : signatures_) {
    first += signature.shape[0];
  }
  TORCH_CHECK_WITH(
      DistBackendError, static_cast<int64_t>(total) == first * row, "the neighbors' tensors have ", total, " bytes for ", first,
      " rows of ", row, " bytes: their shapes differ beyond the first dimension");
  sizes[0] = first;
  // The driving thread may be in inference mode, but the tensor belongs to another thread.
  const c10::InferenceMode normal(false);
  result_ = at::empty(sizes, tensor_.options().requires_grad(false));
  auto* place = static_cast<char*>(result_.mutable_data_ptr());
  for (size_t i = 0; i < sources_.size(); ++i) {
    places_.push_back(place);
    if (sources_[i] == rank()) {
      copy_bytes(place, tensor_.const_data_ptr(), bytes[i]);
    }
    place += bytes[i];
  }
  set_outputs({result_});
}

} // namespace fog
