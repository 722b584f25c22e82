#include "reduce.hpp"

#include <c10/core/ScalarType.h>

#include "slices.hpp"

namespace fog::mpi {
namespace {

constexpr size_t kWholeBytes = 64 * 1024;

} // namespace

Reduce::Reduce(Signature signature, void* data, size_t numel, double scale)
    : Operation(signature),
      data_(static_cast<char*>(data)),
      numel_(numel),
      item_(c10::elementSize(static_cast<c10::ScalarType>(signature.dtype))),
      scale_(scale) {}

char* Reduce::slice(int rank) const {
  return data_ + slice_of(numel_, rank, size()).begin * item_;
}

void Reduce::launch() {
  whole_ = numel_ * item_ <= kWholeBytes || size() == 2;
  inputs_ = ReductionInputs(size());
  if (whole_ && !at_root()) {
    send(signature_.root, 0, data_, numel_ * item_, scale_);
    expect_announcement(signature_.root);
    return;
  }
  const size_t mine = whole_ ? numel_ * item_ : slice_of(numel_, rank(), size()).numel * item_;
  auto* place = static_cast<char*>(scratch(mine * static_cast<size_t>(size())));
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) {
      inputs_.data[peer] = whole_ ? data_ : slice(peer);
      inputs_.scales[peer] = scale_;
      continue;
    }
    inputs_.data[peer] = place;
    inputs_.receives[peer] = receive(peer, 0, place, mine);
    place += mine;
    if (whole_) {
      announce_to(peer);
    } else {
      send(peer, 0, slice(peer), slice_of(numel_, peer, size()).numel * item_, scale_);
      if (at_root()) {
        receive(peer, 1, slice(peer), slice_of(numel_, peer, size()).numel * item_);
      }
    }
  }
  result_ = at_root() ? (whole_ ? data_ : slice(rank())) : place;
}

Operation::Action Reduce::advance() {
  if (whole_ && !at_root()) {
    return announced() ? Action::kDone : Action::kWait;
  }
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
    phase_ = Phase::kGather;
    if (!whole_ && !at_root()) {
      send(signature_.root, 1, result_, slice_of(numel_, rank(), size()).numel * item_);
    }
  }
  return received(1) ? Action::kDone : Action::kWait;
}

void Reduce::compute() {
  inputs_.reduce_into(signature_, result_, whole_ ? numel_ : slice_of(numel_, rank(), size()).numel);
}

} // namespace fog::mpi
