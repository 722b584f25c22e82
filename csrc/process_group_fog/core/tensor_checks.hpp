// Checks of tensor arguments.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

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

// Throws ValueError unless all `tensors` have one dtype and shape and can be written to.
void check_list(const char* op, const char* argument, const std::vector<at::Tensor>& tensors);

} // namespace fog
