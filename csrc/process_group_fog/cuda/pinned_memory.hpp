// Host memory that a device copies to and from by itself.
#pragma once

#include <cstddef>

#include <ATen/core/Tensor.h>

namespace fog::cuda {

// A page-locked CPU tensor, or an ordinary one where the device's allocator has no such memory: copies are then slower, and
// the host may wait for them.
at::Tensor empty_pinned(at::IntArrayRef sizes, c10::ScalarType dtype);

// Has the device's driver page-lock memory that is there already, until the end of this object; nothing where there is no
// driver or it refuses.
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

// Page-locked host memory that kernels of a device read and write where it is; zeros at first. By its end they must have done so.
class MappedMemory {
 public:
  // RuntimeError if the device has no driver or the driver refuses.
  MappedMemory(const at::Device& device, size_t bytes);
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  template <typename T>
  volatile T* as() const {
    return static_cast<volatile T*>(memory_);
  }

 private:
  const at::Device device_;
  void* memory_ = nullptr;
};

} // namespace fog::cuda
