// Checks of tensor arguments.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace fog {

// Throws unless `tensor` is a dense tensor on `device`: ValueError naming `op`, `argument`, what came and what is allowed.
void check_tensor(const char* op, const char* argument, const at::Tensor& tensor, const at::Device& device = at::kCPU);

// The same for a tensor that is written to; its elements must not share memory with each other (expanded tensors).
void check_output(const char* op, const char* argument, const at::Tensor& tensor, const at::Device& device = at::kCPU);

// The one tensor of a list that c10d passes for one device each.
const at::Tensor& only_tensor(const char* op, const char* argument, const std::vector<at::Tensor>& tensors);

// The list for the one device.
const std::vector<at::Tensor>& only_list(const char* op, const char* argument, const std::vector<std::vector<at::Tensor>>& lists);

// Throws ValueError unless `tensors` holds tensors of one dtype and shape, all of which may be written to.
void check_list(const char* op, const char* argument, const std::vector<at::Tensor>& tensors);

} // namespace fog
