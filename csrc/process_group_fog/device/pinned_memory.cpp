#include "device/pinned_memory.hpp"

#include <exception>

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>

#include "device/runtime.hpp"

namespace fog::device {
namespace {

constexpr unsigned kPortable = 1; // cudaHostRegisterPortable: page-locked for every context of the process

} // namespace

at::Tensor empty_pinned(at::IntArrayRef sizes, c10::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
  try {
    return at::empty(sizes, options.pinned_memory(true));
  } catch (const std::exception&) { // this device's allocator has no pinned memory
    return at::empty(sizes, options);
  }
}

PinnedMemory::PinnedMemory(const at::Device& device, void* memory, size_t bytes) : device_(device) {
  auto* lock = of_runtime<int(void*, size_t, unsigned)>("cudaHostRegister");
  if (lock == nullptr || bytes == 0) {
    return;
  }
  const c10::DeviceGuard guard(device); // if there is no context yet, the runtime creates one on this device
  if (lock(memory, bytes, kPortable) == 0) {
    memory_ = memory;
  } else { // for example pages of another window that are locked already
    forget_error();
  }
}

PinnedMemory::~PinnedMemory() {
  if (memory_ == nullptr) {
    return;
  }
  try {
    const c10::DeviceGuard guard(device_);
    if (of_runtime<int(void*)>("cudaHostUnregister")(memory_) != 0) {
      forget_error();
    }
  } catch (const std::exception&) { // the device has ended with the process
  }
}

} // namespace fog::device
