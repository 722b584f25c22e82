// Functions of the CUDA runtime that torch has no operation for. fog is built without CUDA.
#pragma once

#include <dlfcn.h>

namespace fog::device {

// Returns the function of this name in torch's device library; null if the process has not loaded the library.
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
inline void forget_error() {
  if (auto* forget = of_runtime<int()>("cudaGetLastError")) {
    forget();
  }
}

} // namespace fog::device
