#include "reduce_scatter.hpp"

#include <c10/core/ScalarType.h>

namespace fog::mpi {

ReduceScatter::ReduceScatter(
    Signature signature, std::vector<const void*> inputs, std::vector<size_t> bytes, void* out, double scale)
    : Operation(signature), sends_from_(std::move(inputs)), bytes_(std::move(bytes)), out_(out), scale_(scale) {}

void ReduceScatter::launch() {
  inputs_ = ReductionInputs(size());
  const size_t mine = bytes_[rank()];
  auto* place = static_cast<char*>(scratch(mine * static_cast<size_t>(size() - 1)));
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) {
      inputs_.data[peer] = sends_from_[peer];
      inputs_.scales[peer] = scale_;
      continue;
    }
    inputs_.data[peer] = place;
    inputs_.receives[peer] = receive(peer, 0, place, mine);
    place += mine;
  }
  for (int distance = 1; distance < size(); ++distance) {
    const int peer = (rank() + distance) % size();
    send(peer, 0, sends_from_[peer], bytes_[peer], scale_);
  }
}

Operation::Action ReduceScatter::advance() {
  if (reduced_) {
    return Action::kDone;
  }
  if (!received(0)) {
    return Action::kWait;
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) {
      inputs_.scales[peer] = header(inputs_.receives[peer]).scale;
    }
  }
  reduced_ = true;
  return Action::kCompute;
}

void ReduceScatter::compute() {
  inputs_.reduce_into(signature_, out_, bytes_[rank()] / c10::elementSize(static_cast<c10::ScalarType>(signature_.dtype)));
}

} // namespace fog::mpi
