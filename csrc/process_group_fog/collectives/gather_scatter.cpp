#include "collectives/gather_scatter.hpp"

namespace fog {

Gather::Gather(Signature signature, Part input, std::vector<Part> outputs)
    : Operation(signature), input_(input), outputs_(std::move(outputs)) {}

void Gather::launch() {
  if (rank() != signature_.root) {
    send(signature_.root, 0, input_.data, input_.bytes);
    expect_announcement(signature_.root);
    return;
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) {
      receive(peer, 0, outputs_[peer].data, outputs_[peer].bytes);
      announce_to(peer);
    }
  }
}

Operation::Action Gather::advance() {
  if (rank() == signature_.root && !copied_) {
    copied_ = true;
    return Action::kCompute;
  }
  return received(0) && announced() ? Action::kDone : Action::kWait;
}

void Gather::compute() {
  copy_own(input_, outputs_[rank()]);
}

Scatter::Scatter(Signature signature, std::vector<Part> inputs, Part output)
    : Operation(signature), inputs_(std::move(inputs)), output_(output) {}

void Scatter::launch() {
  if (rank() != signature_.root) {
    receive(signature_.root, 0, output_.data, output_.bytes);
    announce_to(signature_.root);
    return;
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) {
      send(peer, 0, inputs_[peer].data, inputs_[peer].bytes);
      expect_announcement(peer);
    }
  }
}

Operation::Action Scatter::advance() {
  if (rank() == signature_.root && !copied_) {
    copied_ = true;
    return Action::kCompute;
  }
  return received(0) && announced() ? Action::kDone : Action::kWait;
}

void Scatter::compute() {
  copy_own(inputs_[rank()], output_);
}

Alltoall::Alltoall(Signature signature, std::vector<Part> inputs, std::vector<Part> outputs)
    : Operation(signature), inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}

void Alltoall::launch() {
  for (int distance = 1; distance < size(); ++distance) {
    const int from = (rank() - distance + size()) % size();
    receive(from, 0, outputs_[from].data, outputs_[from].bytes);
  }
  for (int distance = 1; distance < size(); ++distance) {
    const int to = (rank() + distance) % size();
    send_after_theirs({{to}}, 0, inputs_[to].data, inputs_[to].bytes);
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
