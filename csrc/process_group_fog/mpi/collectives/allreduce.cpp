#include "allreduce.hpp"

#include <c10/core/ScalarType.h>

#include "slices.hpp"

namespace fog::mpi {

Allreduce::Allreduce(Signature signature, void* data, size_t numel, double scale)
    : Operation(signature),
      data_(static_cast<char*>(data)),
      numel_(numel),
      item_(c10::elementSize(static_cast<c10::ScalarType>(signature.dtype))),
      scale_(scale) {}

char* Allreduce::slice(int rank) const {
  return data_ + (whole_ ? 0 : slice_of(numel_, rank, size()).begin * item_);
}

void Allreduce::launch() {
  whole_ = numel_ * item_ <= Messenger::kInlineBytes;
  inputs_ = ReductionInputs(size());
  const size_t mine = (whole_ ? numel_ : slice_of(numel_, rank(), size()).numel) * item_;
  auto* place = static_cast<char*>(scratch(mine * static_cast<size_t>(size() - 1)));
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) {
      inputs_.data[peer] = slice(peer);
      inputs_.scales[peer] = scale_;
      continue;
    }
    inputs_.data[peer] = place;
    inputs_.receives[peer] = receive(peer, 0, place, mine);
    place += mine;
    if (!whole_) {
      // Comes after `peer` has all of its slice from here, so nothing that is still to be sent is overwritten.
      receive(peer, 1, slice(peer), slice_of(numel_, peer, size()).numel * item_);
    }
  }
  for (int distance = 1; distance < size(); ++distance) {
    const int peer = (rank() + distance) % size(); // not everybody to rank 0 first
    send(peer, 0, slice(peer), (whole_ ? numel_ : slice_of(numel_, peer, size()).numel) * item_, scale_);
  }
}

Operation::Action Allreduce::advance() {
  if (phase_ == Phase::kCollect) {
    if (!received(0)) {
      return Action::kWait;
    }
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) {
        inputs_.scales[peer] = header(inputs_.receives[peer]).scale;
      }
    }
    phase_ = Phase::kReduced;
    return Action::kCompute;
  }
  if (phase_ == Phase::kReduced) {
    phase_ = Phase::kSpread;
    if (!whole_) {
      for (int distance = 1; distance < size(); ++distance) {
        send((rank() + distance) % size(), 1, slice(rank()), slice_of(numel_, rank(), size()).numel * item_);
      }
    }
  }
  return whole_ || received(1) ? Action::kDone : Action::kWait;
}

void Allreduce::compute() {
  inputs_.reduce_into(signature_, slice(rank()), whole_ ? numel_ : slice_of(numel_, rank(), size()).numel);
}

} // namespace fog::mpi
