// Decides exactly which tensors share memory: views that interleave, such as columns of a matrix, do not.
#pragma once

#include <cstddef>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

namespace fog {

// Returns whether any byte of an element of `one` belongs to an element of `other` too.
bool share_memory(const at::Tensor& one, const at::Tensor& other);

// Returns whether two elements of the tensor share memory.
bool shares_with_itself(const at::Tensor& tensor);

// Returns whether two tensors are the same elements of the same memory, in the same order. Their shapes may differ.
bool same_memory(const at::Tensor& one, const at::Tensor& other);

// Returns whether `part` is exactly part `number` of `whole`, cut into `count` equal parts along its elements in order.
bool is_part(const at::Tensor& part, const at::Tensor& whole, int number, int count);

// The tensors of an operation, with the name of their argument.
struct Argument {
  const char* name;
  c10::ArrayRef<at::Tensor> tensors;
};

// Throws ValueError, naming both tensors, if an output shares memory with another output, or with an input.
// `in_place(output, input)` says whether the operation is correct although this input lies in this output. Inputs may
// share memory with each other. If no tensors overlap, the check takes the time of sorting them.
void check_disjoint(
    const char* op,
    const Argument& outputs,
    const Argument& inputs,
    c10::function_ref<bool(size_t output, size_t input)> in_place = [](size_t, size_t) { return false; });

} // namespace fog
