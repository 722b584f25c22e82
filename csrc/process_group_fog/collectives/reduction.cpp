#include "collectives/reduction.hpp"

#include <algorithm>

#include <c10/core/ScalarType.h>

#include "core/arithmetic.hpp"

namespace fog {

Reduction::Reduction(Signature signature, double scale, std::vector<int> members)
    : Operation(signature),
      item_(c10::elementSize(static_cast<c10::ScalarType>(signature.dtype))),
      scale_(scale),
      members_(std::move(members)) {}

int Reduction::count() const {
  return members_.empty() ? size() : static_cast<int>(members_.size());
}

int Reduction::member(int place) const {
  return members_.empty() ? place : members_[place];
}

int Reduction::place() const {
  return members_.empty() ? rank() : static_cast<int>(std::find(members_.begin(), members_.end(), rank()) - members_.begin());
}

void Reduction::use_own_input(const void* data) {
  inputs_.resize(count());
  scales_.resize(count(), 1.0);
  inputs_[place()].data = data;
  scales_[place()] = scale_;
}

void Reduction::expect_input(int place, size_t bytes) {
  expected_.push_back({place, receive_input(member(place), 0, bytes)});
}

void Reduction::reduce_into(void* out) {
  for (const auto& [place, receive] : expected_) {
    inputs_[place] = input(receive);
    scales_[place] = header(receive).scale;
  }
  const auto op = static_cast<c10d::ReduceOp::RedOpType>(signature_.reduce_op);
  const auto dtype = static_cast<c10::ScalarType>(signature_.dtype);
  for_pieces(inputs_, item_, used() / item_, usable() / item_, [&](const std::vector<const void*>& where, size_t begin, size_t count) {
    reduce(op, dtype, static_cast<char*>(out) + begin * item_, where, scales_, count);
  });
}

} // namespace fog
