#include "allreduce.hpp"

#include "slices.hpp"

namespace fog::mpi {

Allreduce::Allreduce(Signature signature, void* data, size_t numel, double scale)
    : Reduction(signature, scale), data_(static_cast<char*>(data)), numel_(numel) {}

char* Allreduce::slice(int rank) const {
  return data_ + (whole_ ? 0 : slice_of(numel_, rank, size()).begin * item());
}

void Allreduce::launch() {
  whole_ = numel_ * item() <= Messenger::kInlineBytes;
  const size_t mine = (whole_ ? numel_ : slice_of(numel_, rank(), size()).numel) * item();
  use_own_input(slice(rank()));
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) {
      continue;
    }
    expect_input(peer, mine);
    if (!whole_) {
      // Comes after `peer` has all of its slice from here, so nothing that is still to be read is overwritten.
      receive(peer, 1, slice(peer), slice_of(numel_, peer, size()).numel * item());
    }
  }
  for (int distance = 1; distance < size(); ++distance) {
    const int peer = (rank() + distance) % size(); // not everybody to rank 0 first
    send(peer, 0, slice(peer), (whole_ ? numel_ : slice_of(numel_, peer, size()).numel) * item(), scale());
  }
}

Operation::Action Allreduce::advance() {
  if (phase_ == Phase::kCollect) {
    if (!received(0)) {
      return Action::kWait;
    }
    collect_inputs();
    phase_ = Phase::kReduced;
    return Action::kCompute;
  }
  if (phase_ == Phase::kReduced) {
    phase_ = Phase::kSpread;
    if (!whole_) {
      for (int distance = 1; distance < size(); ++distance) {
        send((rank() + distance) % size(), 1, slice(rank()), slice_of(numel_, rank(), size()).numel * item());
      }
    }
  }
  return whole_ || received(1) ? Action::kDone : Action::kWait;
}

void Allreduce::compute() {
  reduce_into(slice(rank()), whole_ ? numel_ : slice_of(numel_, rank(), size()).numel);
}

} // namespace fog::mpi
