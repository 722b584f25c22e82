#include "device/pinned_memory.hpp"

#include <dlfcn.h>

#include <exception>

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>

namespace fog::device {
namespace {

constexpr unsigned kPortable = 1; // cudaHostRegisterPortable: page-locked for every context of the process

// fog is built without CUDA, and torch has no operation that page-locks memory which is there already. So this looks in torch's own
// library for devices, if the process has loaded it, for a function of the runtime that it is linked with; null if there is none.
template <typename Function>
Function* of_runtime(const char* name) {
  void* library = dlopen("libc10_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    return nullptr;
  }
  auto* function = reinterpret_cast<Function*>(dlsym(library, name));
  dlclose(library); // torch keeps it
  return function;
}

// torch takes the last error that the runtime remembers for one of its own.
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
  } catch (const std::exception&) { // this device's allocator has none
    return at::empty(sizes, options);
  }
}

PinnedMemory::PinnedMemory(const at::Device& device, void* memory, size_t bytes) : device_(device) {
  auto* lock = of_runtime<int(void*, size_t, unsigned)>("cudaHostRegister");
  if (lock == nullptr || bytes == 0) {
    return;
  }
  const c10::DeviceGuard guard(device); // where the runtime makes a context if there is none
  if (lock(memory, bytes, kPortable) == 0) {
    memory_ = memory;
  } else { // pages of a window that is locked already, for example
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
