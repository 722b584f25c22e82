// Contiguous copies of non-contiguous tensors.
#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "core/tensor_checks.hpp"
#include "core/tensor_lists.hpp"
#include "engine/operation.hpp"
#include "transport/shared_memory/shared_tensors.hpp"

namespace fog {

// Provides contiguous memory for a tensor: its own, or shared memory. An operation's results are copied from there to the
// tensor at its end; neither autograd nor the version counter sees the copies, as is usual for collectives.
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

  // The operation keeps all this memory, and copies outputs back at its end.
  void attach(Operation& operation) const;
  // Copies outputs back; empty if there is nothing to copy.
  std::function<void()> copy_back() const;

 private:
  at::Tensor kept(at::Tensor tensor) {
    kept_.push_back(tensor);
    return tensor;
  }
  struct Copy {
    at::Tensor from;
    at::Tensor to;
  };
  std::vector<at::Tensor> kept_;
  std::vector<Copy> copies_;
};

} // namespace fog
