// Checks of arguments against each other, and the memory of arguments, for several operations.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "collectives/part.hpp"
#include "core/signature.hpp"

namespace fog {

// The device of a tensor that has not been checked yet.
inline at::Device where_is(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.device() : at::Device(at::kCPU);
}

// Throws ValueError unless `tensor` has the dtype of `like`, the operation's input.
void check_same(const char* op, const char* argument, const at::Tensor& tensor, const at::Tensor& like);

// Throws ValueError unless `tensor` has `numel` elements.
void check_numel(const char* op, const char* argument, const at::Tensor& tensor, int64_t numel);

// Throws ValueError unless there is one tensor for each rank. `where`: "", or " on the root".
void check_count(const char* op, const char* argument, const std::vector<at::Tensor>& tensors, int size, const char* where = "");

// PREMUL_SUM's factor, 1 for every other reduction.
double factor_of(const c10d::ReduceOp& op);

// Throws ValueError unless the reduction is defined for the tensor's dtype.
Signature reduction_signature(OpKind kind, const at::Tensor& tensor, const c10d::ReduceOp& op);

// The memory of a contiguous tensor.
Part part_of(const at::Tensor& tensor);

// Divides a contiguous tensor into equal parts, one per rank.
std::vector<Part> parts_of(const at::Tensor& tensor, int count);

} // namespace fog
