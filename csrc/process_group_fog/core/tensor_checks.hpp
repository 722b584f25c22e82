// Checks of tensor arguments.
#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

namespace fog {

// Throws ValueError unless `tensor` is a dense tensor on `device`. The error names `op`, `argument`, the tensor's
// properties and the allowed ones.
void check_tensor(const char* op, const char* argument, const at::Tensor& tensor, const at::Device& device = at::kCPU);

// Does the same for a tensor that is written to. Its elements must not share memory with each other, as in expanded
// tensors.
void check_output(const char* op, const char* argument, const at::Tensor& tensor, const at::Device& device = at::kCPU);

// Returns the only tensor of a list in which c10d passes one tensor per device.
const at::Tensor& only_tensor(const char* op, const char* argument, const std::vector<at::Tensor>& tensors);

// Returns the only list of lists in which c10d passes one list per device.
const std::vector<at::Tensor>& only_list(const char* op, const char* argument, const std::vector<std::vector<at::Tensor>>& lists);

// Decides exactly which tensors share memory: views that interleave, such as columns of a matrix, do not.

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
