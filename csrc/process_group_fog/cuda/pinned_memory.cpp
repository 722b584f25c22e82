#include "cuda/pinned_memory.hpp"

#include <cstring>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include "cuda/driver.hpp"
#include "cuda/releases.hpp"

namespace fog::cuda {

at::Tensor empty_pinned(at::IntArrayRef sizes, c10::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
  try {
    return at::empty(sizes, options.pinned_memory(true));
  } catch (const std::exception&) { // this device's allocator has none
    return at::empty(sizes, options);
  }
}

PinnedMemory::PinnedMemory(const at::Device& device, void* memory, size_t bytes) : device_(device) {
  if (bytes == 0) {
    return;
  }
  try {
    const auto& driver = Driver::of(device.type());
    const auto entered = driver.enter(device);
    driver.check(driver.host_register(memory, bytes, kHostRegisterPortable), "page-lock memory");
    memory_ = memory;
  } catch (const std::exception&) { // pages of a window that is locked already, for example
  }
}

PinnedMemory::~PinnedMemory() {
  if (memory_ != nullptr) {
    try {
      const auto& driver = Driver::of(device_.type());
      const auto entered = driver.enter(device_);
      driver.host_unregister(memory_);
    } catch (const std::exception&) { // the driver has ended with the process
    }
  }
}

MappedMemory::MappedMemory(const at::Device& device, size_t bytes) : device_(device) {
  const auto& driver = Driver::of(device.type());
  const auto entered = driver.enter(device);
  driver.check(driver.host_allocate(&memory_, bytes, kHostAllocPortable | kHostAllocMapped), "allocate page-locked memory");
  std::memset(memory_, 0, bytes);
}

MappedMemory::~MappedMemory() {
  give_back(device_, [memory = memory_](const Driver& driver) { driver.host_free(memory); });
}

} // namespace fog::cuda
