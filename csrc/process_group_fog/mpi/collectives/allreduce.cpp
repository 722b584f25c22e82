#include "allreduce.hpp"

#include "slices.hpp"

namespace fog::mpi {

Allreduce::Allreduce(Signature signature, void* data, size_t numel, double scale)
    : Reduction(signature, scale), data_(static_cast<char*>(data)), numel_(numel) {}

char* Allreduce::slice(int rank) const {
  return data_ + (whole_ ? 0 : slice_of(numel_, rank, size()).begin * item());
}

// Bytes that this rank reduces.
size_t Allreduce::part() const {
  return (whole_ ? numel_ : slice_of(numel_, rank(), size()).numel) * item();
}

void Allreduce::launch() {
  whole_ = numel_ * item() <= Messenger::kInlineBytes;
  use_own_input(slice(rank()));
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) {
      continue;
    }
    expect_input(peer, part());
    if (!whole_) {
      // Comes after `peer` has all of its slice from here, so nothing that is still to be read is overwritten.
      receive(peer, 1, slice(peer), slice_of(numel_, peer, size()).numel * item());
    }
  }
  auto destinations = others();
  for (auto& destination : destinations) {
    destination.scale = scale();
    if (!whole_) {
      send({destination}, 0, slice(destination.peer), slice_of(numel_, destination.peer, size()).numel * item());
    }
  }
  if (whole_) {
    send(destinations, 0, data_, part());
  }
}

Operation::Action Allreduce::advance() {
  if (!reduced_) {
    const auto action = use_operands(part());
    if (action != Action::kDone) {
      return action;
    }
    reduced_ = true;
    if (!whole_) {
      send(others(), 1, slice(rank()), part());
    }
  }
  return whole_ || received(1) ? Action::kDone : Action::kWait;
}

void Allreduce::compute() {
  reduce_into(slice(rank()));
}

} // namespace fog::mpi
