// Checks of tensor arguments, and contiguous stand-ins for tensors that are not.
#pragma once

#include <functional>
#include <optional>
#include <string>
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

// Copies as collectives do: neither autograd nor the version counter sees it.
void copy_tensor(const at::Tensor& to, const at::Tensor& from);

// The memory of tensors of one dtype that lie one after the other, without gaps, in one storage, as a vector.
std::optional<at::Tensor> adjacent(const std::vector<at::Tensor>& tensors);

// Tensors of one dtype, one after the other in new memory.
at::Tensor flatten(const std::vector<at::Tensor>& tensors);

// Consecutive parts of `flat` with the shapes of the tensors.
std::vector<at::Tensor> views_of(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

// Copies consecutive parts of `flat` to the tensors.
void unflatten(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

// Those at these places of a list.
std::vector<at::Tensor> pick(const std::vector<at::Tensor>& tensors, const std::vector<size_t>& places);

// Contiguous memory for a tensor: its own, or shared memory. What an operation writes there is copied to the tensor by copy_back(); neither autograd
// nor the version counter sees the copies, as is usual for collectives.
class Staging {
 public:
  // The tensor's own memory if it is contiguous, else a copy.
  at::Tensor input(const at::Tensor& tensor);
  // The tensor's own memory if it is contiguous, else memory to be copied back.
  at::Tensor output(const at::Tensor& tensor);
  // Both.
  at::Tensor in_place(const at::Tensor& tensor);
  // The same for tensors of one dtype, one after the other in flat memory: their own if that is how they lie in a storage.
  at::Tensor input(const std::vector<at::Tensor>& tensors);
  at::Tensor output(const std::vector<at::Tensor>& tensors);

  // Copies outputs back; empty if there is nothing to copy.
  std::function<void()> copy_back() const;

 private:
  struct Copy {
    at::Tensor from;
    at::Tensor to;
  };
  std::vector<Copy> copies_;
};

} // namespace fog
