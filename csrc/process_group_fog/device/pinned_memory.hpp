// Host memory that a device copies to and from by itself.
#pragma once

#include <cstddef>

#include <ATen/core/Tensor.h>

namespace fog::device {

// A page-locked CPU tensor, or an ordinary one where the device's allocator has no such memory: copies are then slower, and
// the host may wait for them.
at::Tensor empty_pinned(at::IntArrayRef sizes, c10::ScalarType dtype);

// Has the CUDA runtime that torch has loaded page-lock memory that is there already, until the end of this object; nothing where
// there is no such runtime or it refuses.
class PinnedMemory {
 public:
  PinnedMemory(const at::Device& device, void* memory, size_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

 private:
  const at::Device device_;
  void* memory_ = nullptr; // null: it is not locked
};

} // namespace fog::device
