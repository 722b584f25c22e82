// Page-locked host memory, which a device can access directly.
#pragma once

#include <cstddef>

#include <ATen/core/Tensor.h>

namespace fog::device {

// Returns a page-locked CPU tensor, or an ordinary one if the device's allocator has no such memory: copies are then
// slower, and the host may wait for them.
at::Tensor empty_pinned(at::IntArrayRef sizes, c10::ScalarType dtype);

// Page-locks existing memory during its lifetime, by the CUDA runtime that torch has loaded. Does nothing without such
// a runtime or if it refuses.
class PinnedMemory {
 public:
  PinnedMemory(const at::Device& device, void* memory, size_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

 private:
  const at::Device device_;
  void* memory_ = nullptr; // null if it is not locked
};

} // namespace fog::device
