// Which tensors share memory, decided exactly: views that interleave, as columns of a matrix do, share none.
#pragma once

#include <cstddef>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

namespace fog {

// Whether an element of one lies, with any of its bytes, where an element of the other does.
bool share_memory(const at::Tensor& one, const at::Tensor& other);

// Whether two elements of the tensor are one.
bool shares_with_itself(const at::Tensor& tensor);

// Whether two tensors are the same elements of the same memory, in the same order; shapes may differ.
bool same_memory(const at::Tensor& one, const at::Tensor& other);

// Whether `part` is exactly the part with this number of `count` equal ones of `whole`, cut along its elements in order.
bool is_part(const at::Tensor& part, const at::Tensor& whole, int number, int count);

// Tensors of an operation under the name of their argument.
struct Argument {
  const char* name;
  c10::ArrayRef<at::Tensor> tensors;
};

// Throws ValueError, naming both, if an output shares memory with another one, or with an input that is not `in_place`: where an
// operation is right although the input with the second number lies in the output with the first. Inputs may share memory with each
// other. The time is that of sorting as long as there are no such pairs.
void check_disjoint(
    const char* op,
    const Argument& outputs,
    const Argument& inputs,
    c10::function_ref<bool(size_t output, size_t input)> in_place = [](size_t, size_t) { return false; });

} // namespace fog
