// Stands in for libcuda and NVRTC: what fog calls of them, for a device whose memory is the host's and whose streams are Queues.
//
// Memory can be mapped by other processes, as with CUDA's IPC, and goes with the process that made it. Kernels are fog's own source
// compiled for the host: a launch runs its threads one after the other, on the stream. What real drivers refuse is refused: another
// context, handles of freed memory, unknown kernels, pages registered twice.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "streams.hpp"

namespace {

using device_double::Queue;

// --- the kernels ---

struct Dimensions {
  unsigned x = 0, y = 0, z = 0;
};
thread_local Dimensions blockIdx, threadIdx, blockDim, gridDim;

// Calls a kernel with a copy of the arguments, as they were at its launch.
struct Kernel {
  std::vector<size_t> sizes;
  void (*call)(void* function, void** arguments) = nullptr;
  void* function = nullptr;
  std::shared_ptr<std::atomic<bool>> loaded = std::make_shared<std::atomic<bool>>(false);
};

std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}

template <typename... Arguments, size_t... kPlaces>
void call(void (*function)(Arguments...), void** arguments, std::index_sequence<kPlaces...> /*places*/) {
  function(*static_cast<std::decay_t<Arguments>*>(arguments[kPlaces])...);
}

struct Registration {
  template <typename... Arguments>
  Registration(const char* name, void (*function)(Arguments...)) {
    kernels()[name] = {
        {sizeof(Arguments)...},
        [](void* address, void** arguments) {
          call(reinterpret_cast<void (*)(Arguments...)>(address), arguments, std::index_sequence_for<Arguments...>());
        },
        reinterpret_cast<void*>(function),
        std::make_shared<std::atomic<bool>>(false)};
  }
};

#define __global__
#define __device__
#define FOG_KERNEL(name, ...)                              \
  void name(__VA_ARGS__);                                  \
  const Registration registration_of_##name(#name, &name); \
  void name(__VA_ARGS__)

[[maybe_unused]] unsigned long long nanoseconds() {
  return static_cast<unsigned long long>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count());
}

template <typename T>
T atomicCAS_system(T* place, T expected, T desired) {
  __atomic_compare_exchange_n(place, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}

template <typename T>
T atomicExch_system(T* place, T value) {
  return __atomic_exchange_n(place, value, __ATOMIC_SEQ_CST);
}

template <typename T>
T atomicAdd_system(T* place, T value) {
  return __atomic_fetch_add(place, value, __ATOMIC_SEQ_CST);
}

[[maybe_unused]] void __threadfence_system() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

[[maybe_unused]] void __nanosleep(unsigned /*nanoseconds*/) {
  sched_yield(); // the holder may need this core
}

#include "kernels.inc"

float widen(Float16 value) {
  return c10::detail::fp16_ieee_to_fp32_value(value.bits);
}

void narrow(float value, Float16& result) {
  result.bits = c10::detail::fp16_ieee_from_fp32_value(value);
}

constexpr const char* kSource =
#include "kernels.text"
    ;

// --- the driver ---

enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidContext = 201,
  kMapFailed = 205,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kNotFound = 500,
};

constexpr int kDevices = 2;
using Address = unsigned long long;
using Handle = void*;

struct IpcHandle {
  int process;
  int file;
  size_t bytes;
  char rest[48];
};
static_assert(sizeof(IpcHandle) == 64);

struct Memory {
  int file = -1; // of mappings of other processes' memory too
  size_t bytes = 0;
  bool foreign = false;
};

struct State {
  std::mutex mutex;
  std::map<Address, Memory> memory;
  std::map<void*, size_t> host_memory;
  std::map<char*, size_t> registered;
  std::set<Handle> streams;
  std::set<Queue*> used; // streams on which something was started
  std::map<std::string, int> failures; // functions that tests want to fail
  std::map<std::string, long> calls;
};

State& state() {
  static auto* all = new State;
  return *all;
}

int contexts[kDevices]; // their addresses count
thread_local Handle current_context = nullptr;

// What a test wants the function to return.
int enter(const char* function) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  ++state().calls[function];
  const auto found = state().failures.find(function);
  return found == state().failures.end() ? kSuccess : found->second;
}

#define ENTER(function)                                          \
  if (const int wanted = enter(#function); wanted != kSuccess) { \
    return wanted;                                               \
  }
#define ENTER_IN_CONTEXT(function)  \
  ENTER(function)                   \
  if (current_context == nullptr) { \
    return kInvalidContext;         \
  }

Queue& used(Handle stream) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return **state().used.insert(static_cast<Queue*>(stream)).first;
}

// What gives memory back waits for all that the context has been given, as far as that was by this driver.
#define ENTER_AND_SYNCHRONIZE(function) \
  ENTER_IN_CONTEXT(function)            \
  if (!synchronize()) {                 \
    return kInvalidValue;               \
  }

bool synchronize() {
  std::set<Queue*> queues;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    queues = state().used;
  }
  for (auto* queue : queues) {
    if (current_context == &contexts[queue->device()] && !queue->mark()->wait()) {
      return false;
    }
  }
  return true;
}

Result map_file(int file, size_t bytes, bool foreign, Address* address) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) {
    return foreign ? kMapFailed : kOutOfMemory;
  }
  *address = reinterpret_cast<Address>(mapped);
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().memory[*address] = {file, bytes, foreign};
  return kSuccess;
}

Result unmap(Address address, bool foreign) {
  Memory memory;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    const auto found = state().memory.find(address);
    if (found == state().memory.end() || found->second.foreign != foreign) {
      return kInvalidValue;
    }
    memory = found->second;
    state().memory.erase(found);
  }
  munmap(reinterpret_cast<void*>(address), memory.bytes);
  close(memory.file);
  return kSuccess;
}

void run(const Kernel& kernel, Dimensions grid, Dimensions block, std::vector<std::vector<char>> values) {
  std::vector<void*> arguments;
  for (auto& value : values) {
    arguments.push_back(value.data());
  }
  gridDim = grid;
  blockDim = block;
  for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x) {
      kernel.call(kernel.function, arguments.data());
    }
  }
}

struct Program {
  std::string source;
  std::string log;
};

} // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// --- for tests, through ctypes ---

// From now on the function returns `result`, if it is not 0, and does nothing.
EXPORT void device_double_fail(const char* function, int result) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (result == kSuccess) {
    state().failures.erase(function);
  } else {
    state().failures[function] = result;
  }
}

EXPORT long device_double_calls(const char* function) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().calls[function];
}

// Memory of cuMemAlloc, of cuIpcOpenMemHandle, of cuMemHostAlloc, pages of cuMemHostRegister and streams that have not been given back.
EXPORT long device_double_held() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return static_cast<long>(state().memory.size() + state().host_memory.size() + state().registered.size() + state().streams.size());
}

// --- libcuda ---

EXPORT int cuGetErrorString(int result, const char** text) {
  static const std::map<int, const char*> texts = {
      {kSuccess, "no error"},
      {kInvalidValue, "invalid argument"},
      {kOutOfMemory, "out of memory"},
      {kInvalidContext, "invalid device context"},
      {kMapFailed, "mapping of buffer object failed"},
      {kAlreadyRegistered, "part or all of the requested memory range is already mapped"},
      {kNotRegistered, "pointer does not correspond to a registered memory region"},
      {kNotFound, "named symbol not found"},
  };
  const auto found = texts.find(result);
  *text = found == texts.end() ? nullptr : found->second;
  return found == texts.end() ? kInvalidValue : kSuccess;
}

EXPORT int cuCtxGetCurrent(Handle* context) {
  ENTER(cuCtxGetCurrent)
  *context = current_context;
  return kSuccess;
}

EXPORT int cuCtxSetCurrent(Handle context) {
  ENTER(cuCtxSetCurrent)
  current_context = context;
  return kSuccess;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
  ENTER(cuDeviceGet)
  if (ordinal < 0 || ordinal >= kDevices) {
    return kInvalidValue;
  }
  *device = ordinal;
  return kSuccess;
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int /*device*/) {
  ENTER(cuDeviceGetAttribute)
  static const std::map<int, int> values = {{16, 2}, {75, 9}, {76, 0}};
  const auto found = values.find(attribute);
  if (found == values.end()) {
    return kInvalidValue;
  }
  *value = found->second;
  return kSuccess;
}

EXPORT int cuDeviceGetUuid_v2(char* uuid, int device) {
  ENTER(cuDeviceGetUuid_v2)
  std::memset(uuid, 'd', 16);
  uuid[15] = static_cast<char>('0' + device);
  return kSuccess;
}

EXPORT int cuDevicePrimaryCtxRetain(Handle* context, int device) {
  ENTER(cuDevicePrimaryCtxRetain)
  *context = &contexts[device];
  return kSuccess;
}

EXPORT int cuModuleLoadData(Handle* module, const void* image) {
  ENTER_IN_CONTEXT(cuModuleLoadData)
  if (std::strcmp(static_cast<const char*>(image), "kernels for the host") != 0) {
    return kInvalidValue;
  }
  *module = &kernels();
  return kSuccess;
}

EXPORT int cuModuleGetFunction(Handle* function, Handle /*module*/, const char* name) {
  ENTER_IN_CONTEXT(cuModuleGetFunction)
  const auto found = kernels().find(name);
  if (found == kernels().end()) {
    return kNotFound;
  }
  *function = &found->second;
  return kSuccess;
}

EXPORT int cuFuncLoad(Handle function) {
  ENTER_IN_CONTEXT(cuFuncLoad)
  *static_cast<const Kernel*>(function)->loaded = true;
  return kSuccess;
}

EXPORT int cuLaunchKernel(
    Handle function,
    unsigned grid_x,
    unsigned grid_y,
    unsigned grid_z,
    unsigned block_x,
    unsigned block_y,
    unsigned block_z,
    unsigned /*shared*/,
    Handle stream,
    void** arguments,
    void** extra) {
  ENTER_IN_CONTEXT(cuLaunchKernel)
  if (stream == nullptr || grid_x == 0 || grid_y * grid_z != 1 || block_x == 0 || block_x > 1024 || block_y * block_z != 1 ||
      extra != nullptr) {
    return kInvalidValue;
  }
  const auto& kernel = *static_cast<const Kernel*>(function);
  if (!kernel.loaded->exchange(true)) { // CUDA may wait here for all that runs
    enter("lazy load");
  }
  std::vector<std::vector<char>> values;
  size_t total = 0;
  for (size_t i = 0; i < kernel.sizes.size(); ++i) {
    const auto* value = static_cast<const char*>(arguments[i]);
    values.emplace_back(value, value + kernel.sizes[i]);
    total += kernel.sizes[i];
  }
  if (total > 4096) {
    return kInvalidValue;
  }
  auto& queue = used(stream);
  if (current_context != &contexts[queue.device()]) {
    return kInvalidContext;
  }
  queue.enqueue([&kernel, grid_x, block_x, values = std::move(values)]() mutable {
    run(kernel, {grid_x, 1, 1}, {block_x, 1, 1}, std::move(values));
  });
  return kSuccess;
}

EXPORT int cuMemAlloc_v2(Address* address, size_t bytes) {
  ENTER_IN_CONTEXT(cuMemAlloc_v2)
  if (bytes == 0) {
    return kInvalidValue;
  }
  const int file = memfd_create("device double", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    return kOutOfMemory;
  }
  const auto result = map_file(file, bytes, false, address);
  if (result == kSuccess) {
    std::memset(reinterpret_cast<void*>(*address), 0xCD, bytes); // nobody may count on zeros
  }
  return result;
}

EXPORT int cuMemFree_v2(Address address) {
  ENTER_AND_SYNCHRONIZE(cuMemFree_v2)
  return unmap(address, false);
}

EXPORT int cuMemsetD8Async(Address address, unsigned char value, size_t bytes, Handle stream) {
  ENTER_IN_CONTEXT(cuMemsetD8Async)
  used(stream).enqueue([=] { std::memset(reinterpret_cast<void*>(address), value, bytes); });
  return kSuccess;
}

EXPORT int cuMemcpyAsync(Address to, Address from, size_t bytes, Handle stream) {
  ENTER_IN_CONTEXT(cuMemcpyAsync)
  used(stream).enqueue([=] { std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
  return kSuccess;
}

EXPORT int cuMemHostAlloc(void** memory, size_t bytes, unsigned /*flags*/) {
  ENTER_IN_CONTEXT(cuMemHostAlloc)
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (*memory == nullptr) {
    return kOutOfMemory;
  }
  std::memset(*memory, 0xCD, bytes);
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().host_memory[*memory] = bytes;
  return kSuccess;
}

EXPORT int cuMemFreeHost(void* memory) {
  ENTER_AND_SYNCHRONIZE(cuMemFreeHost)
  const std::lock_guard<std::mutex> lock(state().mutex);
  if (state().host_memory.erase(memory) == 0) {
    return kInvalidValue;
  }
  std::free(memory);
  return kSuccess;
}

EXPORT int cuMemHostRegister_v2(void* memory, size_t bytes, unsigned /*flags*/) {
  ENTER_IN_CONTEXT(cuMemHostRegister_v2)
  auto* begin = static_cast<char*>(memory);
  const std::lock_guard<std::mutex> lock(state().mutex);
  for (const auto& [other, length] : state().registered) {
    if (begin < other + length && other < begin + bytes) {
      return kAlreadyRegistered;
    }
  }
  state().registered[begin] = bytes;
  return kSuccess;
}

EXPORT int cuMemHostUnregister(void* memory) {
  ENTER_IN_CONTEXT(cuMemHostUnregister)
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().registered.erase(static_cast<char*>(memory)) == 0 ? kNotRegistered : kSuccess;
}

EXPORT int cuIpcGetMemHandle(IpcHandle* handle, Address address) {
  ENTER_IN_CONTEXT(cuIpcGetMemHandle)
  const std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().memory.find(address);
  if (found == state().memory.end() || found->second.foreign) {
    return kInvalidValue;
  }
  *handle = {getpid(), found->second.file, found->second.bytes, {}};
  return kSuccess;
}

EXPORT int cuIpcOpenMemHandle_v2(Address* address, IpcHandle handle, unsigned flags) {
  ENTER_IN_CONTEXT(cuIpcOpenMemHandle_v2)
  if (flags != 1 || handle.process == getpid()) { // CUDA maps memory of other processes only
    return kInvalidValue;
  }
  const auto path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  return file < 0 ? kMapFailed : map_file(file, handle.bytes, true, address);
}

EXPORT int cuIpcCloseMemHandle(Address address) {
  ENTER_AND_SYNCHRONIZE(cuIpcCloseMemHandle)
  return unmap(address, true);
}

constexpr int kGreatestPriority = -5;

EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER_IN_CONTEXT(cuCtxGetStreamPriorityRange)
  *least = 0;
  *greatest = kGreatestPriority;
  return kSuccess;
}

EXPORT int cuStreamCreateWithPriority(Handle* stream, unsigned flags, int priority) {
  ENTER_IN_CONTEXT(cuStreamCreateWithPriority)
  if (flags != 1 || priority > 0 || priority < kGreatestPriority) {
    return kInvalidValue;
  }
  auto* queue = new Queue(static_cast<int>(static_cast<int*>(current_context) - contexts)); // its thread needs it for ever
  *stream = queue;
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().streams.insert(queue);
  return kSuccess;
}

EXPORT int cuStreamDestroy_v2(Handle stream) {
  ENTER_IN_CONTEXT(cuStreamDestroy_v2)
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().streams.erase(stream) == 0 ? kInvalidValue : kSuccess;
}

EXPORT int cuStreamSynchronize(Handle stream) {
  ENTER_IN_CONTEXT(cuStreamSynchronize)
  try {
    static_cast<Queue*>(stream)->drain();
  } catch (const std::exception&) {
    return kInvalidValue;
  }
  return kSuccess;
}

// --- NVRTC ---

EXPORT const char* nvrtcGetErrorString(int result) {
  return result == 0 ? "NVRTC_SUCCESS" : "NVRTC_ERROR_COMPILATION";
}

EXPORT int nvrtcCreateProgram(
    Handle* program, const char* source, const char* /*name*/, int headers, const char* const* /*h*/, const char* const* /*n*/) {
  ENTER(nvrtcCreateProgram)
  if (headers != 0) {
    return kInvalidValue;
  }
  *program = new Program{source, ""};
  return kSuccess;
}

EXPORT int nvrtcCompileProgram(Handle handle, int count, const char* const* options) {
  ENTER(nvrtcCompileProgram)
  auto& program = *static_cast<Program*>(handle);
  const std::vector<std::string> given(options, options + count);
  for (const std::string needed : {"--gpu-architecture=sm_90", "--fmad=false"}) {
    if (std::find(given.begin(), given.end(), needed) == given.end()) {
      program.log = "the double was not told " + needed;
      return 6;
    }
  }
  if (program.source != kSource) {
    program.log = "the double was built from other kernels";
    return 6;
  }
  return kSuccess;
}

EXPORT int nvrtcGetProgramLogSize(Handle program, size_t* size) {
  *size = static_cast<Program*>(program)->log.size() + 1;
  return kSuccess;
}

EXPORT int nvrtcGetProgramLog(Handle program, char* log) {
  std::strcpy(log, static_cast<Program*>(program)->log.c_str());
  return kSuccess;
}

EXPORT int nvrtcGetCUBINSize(Handle /*program*/, size_t* size) {
  *size = sizeof("kernels for the host");
  return kSuccess;
}

EXPORT int nvrtcGetCUBIN(Handle /*program*/, char* code) {
  std::strcpy(code, "kernels for the host");
  return kSuccess;
}

EXPORT int nvrtcDestroyProgram(Handle* program) {
  delete static_cast<Program*>(*program);
  *program = nullptr;
  return kSuccess;
}
