#include "collectives/alltoall.hpp"

namespace fog {

Alltoall::Alltoall(Signature signature, std::vector<Part> inputs, std::vector<Part> outputs)
    : Operation(signature), inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}

void Alltoall::launch() {
  for (int distance = 1; distance < size(); ++distance) {
    const int from = (rank() - distance + size()) % size();
    receive(from, 0, outputs_[from].data, outputs_[from].bytes);
  }
  for (int distance = 1; distance < size(); ++distance) {
    const int to = (rank() + distance) % size();
    send(to, 0, inputs_[to].data, inputs_[to].bytes);
  }
}

Operation::Action Alltoall::advance() {
  if (!copied_) {
    copied_ = true;
    return Action::kCompute;
  }
  return received(0) ? Action::kDone : Action::kWait;
}

void Alltoall::compute() {
  copy_own(inputs_[rank()], outputs_[rank()]);
}

} // namespace fog
