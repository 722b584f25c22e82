#include "collectives/allreduce.hpp"

#include "collectives/slices.hpp"

namespace fog {

Allreduce::Allreduce(Signature signature, void* data, size_t numel, double scale, std::vector<int> members)
    : Reduction(signature, scale, std::move(members)), data_(static_cast<char*>(data)), numel_(numel) {}

char* Allreduce::slice(int place) const {
  return data_ + (whole_ ? 0 : slice_of(numel_, place, count()).begin * item());
}

size_t Allreduce::part(int place) const {
  return (whole_ ? numel_ : slice_of(numel_, place, count()).numel) * item();
}

std::vector<Operation::Destination> Allreduce::other_members(double scale) const {
  std::vector<Destination> others;
  for (int distance = 1; distance < count(); ++distance) {
    others.push_back({member((own_ + distance) % count()), scale}); // the next one first: not everybody sends to the same
  }
  return others;
}

void Allreduce::launch() {
  whole_ = numel_ * item() <= Transport::kInlineBytes;
  own_ = place();
  use_own_input(slice(own_));
  for (int distance = 1; distance < count(); ++distance) {
    const int other = (own_ + distance) % count();
    expect_input(other, part(own_));
    if (!whole_) {
      // Comes after `other` has all of its slice from here, so nothing that is still to be read is overwritten.
      receive_over(member(other), 1, slice(other), part(other));
      send_after_theirs({{member(other), scale()}}, 0, slice(other), part(other));
    }
  }
  if (whole_) {
    send(other_members(scale()), 0, data_, part(own_));
  }
}

Operation::Action Allreduce::advance() {
  if (!reduced_) {
    const auto action = use_inputs(part(own_));
    if (action != Action::kDone) {
      return action;
    }
    reduced_ = true;
    if (!whole_) {
      send_after_theirs(other_members(), 1, slice(own_), part(own_));
    }
  }
  return whole_ || received(1) ? Action::kDone : Action::kWait;
}

void Allreduce::compute() {
  reduce_into(slice(own_));
}

} // namespace fog
