#include "collectives/reduce.hpp"

#include "collectives/slices.hpp"

namespace fog {
namespace {

constexpr size_t kWholeBytes = 64 * 1024;

} // namespace

Reduce::Reduce(Signature signature, void* data, size_t numel, double scale)
    : Reduction(signature, scale), data_(static_cast<char*>(data)), numel_(numel) {}

char* Reduce::slice(int rank) const {
  return data_ + slice_of(numel_, rank, size()).begin * item();
}

void Reduce::launch() {
  whole_ = numel_ * item() <= kWholeBytes || size() == 2;
  if (whole_ && !at_root()) {
    send(signature_.root, 0, data_, numel_ * item(), scale());
    expect_announcement(signature_.root);
    return;
  }
  part_ = whole_ ? numel_ * item() : slice_of(numel_, rank(), size()).numel * item();
  use_own_input(whole_ ? data_ : slice(rank()));
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank()) {
      continue;
    }
    expect_input(peer, part_);
    if (whole_) {
      announce_to(peer);
    } else {
      const size_t theirs = slice_of(numel_, peer, size()).numel * item();
      if (at_root()) {
        receive_over(peer, 1, slice(peer), theirs);
      }
      send(peer, 0, slice(peer), theirs, scale());
    }
  }
  result_ = at_root() ? (whole_ ? data_ : slice(rank())) : static_cast<char*>(scratch(part_));
}

Operation::Action Reduce::advance() {
  if (whole_ && !at_root()) {
    return announced() ? Action::kDone : Action::kWait;
  }
  if (!reduced_) {
    const auto action = use_inputs(part_);
    if (action != Action::kDone) {
      return action;
    }
    reduced_ = true;
    if (!whole_ && !at_root()) {
      send(signature_.root, 1, result_, part_);
    }
  }
  return received(1) && announced() ? Action::kDone : Action::kWait;
}

void Reduce::compute() {
  reduce_into(result_);
}

} // namespace fog
