// The CUDA driver (libcuda) and its run-time compiler (NVRTC), opened when first needed: fog is built without CUDA, and a
// machine without a GPU never loads them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace fog::cuda {

// Types of cuda.h and nvrtc.h as they are in the ABI; tests/test_cuda_sources.py compares all of this with cuda.h.
using Address = unsigned long long; // CUdeviceptr
struct IpcHandle {
  char bytes[64];
};
struct Uuid {
  char bytes[16];
};
using DriverDevice = int; // CUdevice
using Handle = void*; // CUcontext, CUstream, CUmodule, CUfunction, nvrtcProgram
using DriverResult = int; // CUresult, nvrtcResult: 0 is success

// X(name, symbol, parameters)
#define FOG_CUDA_DRIVER_FUNCTIONS(X)                                                                        \
  X(get_error_string, cuGetErrorString, (DriverResult, const char**))                                       \
  X(context_get_current, cuCtxGetCurrent, (Handle*))                                                        \
  X(context_set_current, cuCtxSetCurrent, (Handle))                                                         \
  X(device_get, cuDeviceGet, (DriverDevice*, int))                                                          \
  X(device_get_attribute, cuDeviceGetAttribute, (int*, int, DriverDevice))                                  \
  X(device_get_uuid, cuDeviceGetUuid_v2, (Uuid*, DriverDevice))                                             \
  X(device_primary_context_retain, cuDevicePrimaryCtxRetain, (Handle*, DriverDevice))                       \
  X(module_load_data, cuModuleLoadData, (Handle*, const void*))                                             \
  X(module_get_function, cuModuleGetFunction, (Handle*, Handle, const char*))                               \
  X(launch_kernel, cuLaunchKernel,                                                                          \
    (Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**, void**)) \
  X(memory_allocate, cuMemAlloc_v2, (Address*, size_t))                                                     \
  X(memory_free, cuMemFree_v2, (Address))                                                                   \
  X(memory_set_async, cuMemsetD8Async, (Address, unsigned char, size_t, Handle))                            \
  X(memory_copy_async, cuMemcpyAsync, (Address, Address, size_t, Handle))                                   \
  X(host_allocate, cuMemHostAlloc, (void**, size_t, unsigned))                                              \
  X(host_free, cuMemFreeHost, (void*))                                                                      \
  X(host_register, cuMemHostRegister_v2, (void*, size_t, unsigned))                                         \
  X(host_unregister, cuMemHostUnregister, (void*))                                                          \
  X(ipc_get_handle, cuIpcGetMemHandle, (IpcHandle*, Address))                                               \
  X(ipc_open_handle, cuIpcOpenMemHandle_v2, (Address*, IpcHandle, unsigned))                                \
  X(ipc_close_handle, cuIpcCloseMemHandle, (Address))                                                       \
  X(context_get_stream_priority_range, cuCtxGetStreamPriorityRange, (int*, int*))                           \
  X(stream_create_with_priority, cuStreamCreateWithPriority, (Handle*, unsigned, int))                      \
  X(stream_destroy, cuStreamDestroy_v2, (Handle))                                                           \
  X(stream_synchronize, cuStreamSynchronize, (Handle))

// The same of those that older drivers of CUDA 12 lack: null there.
#define FOG_CUDA_OPTIONAL_DRIVER_FUNCTIONS(X) X(function_load, cuFuncLoad, (Handle)) // 12.4

#define FOG_NVRTC_FUNCTIONS(X)                                                                                                  \
  X(error_string, nvrtcGetErrorString, const char*, (DriverResult))                                                             \
  X(create, nvrtcCreateProgram, DriverResult, (Handle*, const char*, const char*, int, const char* const*, const char* const*)) \
  X(compile_program, nvrtcCompileProgram, DriverResult, (Handle, int, const char* const*))                                      \
  X(log_size, nvrtcGetProgramLogSize, DriverResult, (Handle, size_t*))                                                          \
  X(program_log, nvrtcGetProgramLog, DriverResult, (Handle, char*))                                                             \
  X(cubin_size, nvrtcGetCUBINSize, DriverResult, (Handle, size_t*))                                                             \
  X(cubin, nvrtcGetCUBIN, DriverResult, (Handle, char*))                                                                        \
  X(destroy, nvrtcDestroyProgram, DriverResult, (Handle*))

enum DriverConstant : int {
  kComputeCapabilityMajor = 75, // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
  kComputeCapabilityMinor = 76, // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
  kMultiprocessorCount = 16, // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
  kIpcLazyEnablePeerAccess = 1, // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
  kHostAllocPortable = 1, // CU_MEMHOSTALLOC_PORTABLE
  kHostAllocMapped = 2, // CU_MEMHOSTALLOC_DEVICEMAP
  kHostRegisterPortable = 1, // CU_MEMHOSTREGISTER_PORTABLE
  kHostRegisterMapped = 2, // CU_MEMHOSTREGISTER_DEVICEMAP
  kStreamNonBlocking = 1, // CU_STREAM_NON_BLOCKING
};

// Where the libraries of a type of device are; `compilers` are tried in their order. For groups and windows that are made from now
// on; a library that is open stays. Nothing is opened here.
void set_driver(at::DeviceType type, std::string library, std::vector<std::string> compilers);

// The functions of one type of device's driver. Thread-safe; never destroyed.
class Driver {
 public:
  // Opens it at the first call. RuntimeError if it cannot be opened, lacks a function, or if no driver is known for the type.
  static const Driver& of(at::DeviceType type);

#define FOG_DECLARE(name, symbol, parameters) DriverResult(*name) parameters = nullptr;
  FOG_CUDA_DRIVER_FUNCTIONS(FOG_DECLARE)
  FOG_CUDA_OPTIONAL_DRIVER_FUNCTIONS(FOG_DECLARE)
#undef FOG_DECLARE

  // RuntimeError that says what the driver says, unless `result` is success. `what` goes on after "fog: cannot ".
  void check(DriverResult result, const char* what) const;
  // While it lives, a device's primary context, which is torch's too, is this thread's current one.
  class Scope {
   public:
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    // The driver's number of the device.
    DriverDevice number() const {
      return number_;
    }

   private:
    friend class Driver;
    Scope(const Driver& driver, DriverDevice number, Handle context);

    const Driver& driver_;
    const DriverDevice number_;
    Handle before_ = nullptr;
    bool changed_ = false;
  };
  [[nodiscard]] Scope enter(const at::Device& device) const;

 private:
  Driver() = default;
  friend struct Opened;
};

// The run-time compiler that goes with it.
class Compiler {
 public:
  // As Driver::of().
  static const Compiler& of(at::DeviceType type);

  // The machine code of CUDA C++ source for a compute capability such as {9, 0}. RuntimeError with the compiler's log.
  std::string compile(const char* source, int major, int minor) const;

#define FOG_DECLARE(name, symbol, result, parameters) result(*name) parameters = nullptr;
  FOG_NVRTC_FUNCTIONS(FOG_DECLARE)
#undef FOG_DECLARE

 private:
  void check(DriverResult code, const char* what) const;
  Compiler() = default;
  friend struct Opened;
};

} // namespace fog::cuda
