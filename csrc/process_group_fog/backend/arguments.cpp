#include "backend/arguments.hpp"

#include <c10/util/Exception.h>

#include "core/arithmetic.hpp"
#include "core/names.hpp"

namespace fog {

void check_same(const char* op, const char* argument, const at::Tensor& tensor, const at::Tensor& like) {
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == like.scalar_type(), op, ": ", argument, ": got dtype ", dtype_name(tensor.scalar_type()), "; allowed is ",
      dtype_name(like.scalar_type()), " as in the input");
}

void check_numel(const char* op, const char* argument, const at::Tensor& tensor, int64_t numel) {
  TORCH_CHECK_VALUE(
      tensor.numel() == numel, op, ": ", argument, ": got shape ", tensor.sizes(), " (", tensor.numel(),
      " elements); allowed is one of ", numel, " elements");
}

void check_count(const char* op, const char* argument, const std::vector<at::Tensor>& tensors, int size, const char* where) {
  TORCH_CHECK_VALUE(
      static_cast<int>(tensors.size()) == size, op, ": ", argument, ": got ", tensors.size(), " tensors", where,
      "; allowed is one for each of the ", size, " ranks");
}

double factor_of(const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) {
    return 1.0;
  }
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr, "op: got PREMUL_SUM without a factor");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

Signature reduction_signature(OpKind kind, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  check_reduction(op.op_, tensor.scalar_type());
  auto signature = Signature::of(kind, tensor);
  signature.reduce_op = static_cast<uint8_t>(op.op_);
  return signature;
}

Part part_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr(), tensor.nbytes()};
}

std::vector<Part> parts_of(const at::Tensor& tensor, int count) {
  std::vector<Part> parts;
  const size_t bytes = tensor.nbytes() / static_cast<size_t>(count);
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  for (int i = 0; i < count; ++i) {
    parts.push_back({data + bytes * static_cast<size_t>(i), bytes});
  }
  return parts;
}

} // namespace fog
