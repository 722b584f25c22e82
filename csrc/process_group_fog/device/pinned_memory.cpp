#include "device/pinned_memory.hpp"

#include <dlfcn.h>

#include <exception>

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>

namespace fog::device {
namespace {

constexpr unsigned kPortable = 1; // cudaHostRegisterPortable: page-locked for every context of the process

// fog is built without CUDA, and torch has no operation to page-lock existing memory. So this looks for a function of
// the CUDA runtime in torch's device library, if the process has loaded it; null if there is none.
template <typename Function>
Function* of_runtime(const char* name) {
  void* library = dlopen("libc10_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    return nullptr;
  }
  auto* function = reinterpret_cast<Function*>(dlsym(library, name));
  dlclose(library); // torch keeps it loaded
  return function;
}

// Clears the runtime's last error: torch would take it for an error of its own.
void forget_error() {
  if (auto* forget = of_runtime<int()>("cudaGetLastError")) {
    forget();
  }
}

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
