#include "reduction.hpp"

#include <c10/core/ScalarType.h>

#include "../../arithmetic.hpp"

namespace fog::mpi {

Reduction::Reduction(Signature signature, double scale)
    : Operation(signature), item_(c10::elementSize(static_cast<c10::ScalarType>(signature.dtype))), scale_(scale) {}

void Reduction::use_own_input(const void* data) {
  operands_.resize(size());
  scales_.resize(size(), 1.0);
  operands_[rank()].data = data;
  scales_[rank()] = scale_;
}

void Reduction::expect_input(int peer, size_t bytes) {
  expected_.push_back({peer, receive_operand(peer, 0, bytes)});
}

void Reduction::reduce_into(void* out) {
  for (const auto& [peer, receive] : expected_) {
    operands_[peer] = operand(receive);
    scales_[peer] = header(receive).scale;
  }
  const auto op = static_cast<c10d::ReduceOp::RedOpType>(signature_.reduce_op);
  const auto dtype = static_cast<c10::ScalarType>(signature_.dtype);
  for_blocks(
      operands_, item_, used() / item_, usable() / item_, [&](const std::vector<const void*>& inputs, size_t begin, size_t count) {
        reduce(op, dtype, static_cast<char*>(out) + begin * item_, inputs, scales_, count);
      });
}

} // namespace fog::mpi
