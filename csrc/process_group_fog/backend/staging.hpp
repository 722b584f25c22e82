// Contiguous copies of non-contiguous tensors.
#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "core/tensor_checks.hpp"
#include "core/tensor_lists.hpp"
#include "transport/shared_memory/shared_tensors.hpp"

namespace fog {

// Provides contiguous memory for a tensor: its own, or shared memory. copy_back() copies an operation's results from
// there to the tensor; neither autograd nor the version counter sees the copies, as is usual for collectives.
class Staging {
 public:
  // The tensor's own memory if it is contiguous, otherwise a copy.
  at::Tensor input(const at::Tensor& tensor);
  // The tensor's own memory if it is contiguous, otherwise memory to be copied back.
  at::Tensor output(const at::Tensor& tensor);
  // Both: a copy that is copied back.
  at::Tensor in_place(const at::Tensor& tensor);
  // The same for tensors of one dtype, one after the other in flat memory: their own if they are contiguous in one
  // storage.
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
