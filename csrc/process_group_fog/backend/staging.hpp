// Contiguous stand-ins for tensors that are not contiguous.
#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "core/tensor_checks.hpp"
#include "core/tensor_lists.hpp"
#include "transport/shared_memory/shared_tensors.hpp"

namespace fog {

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
