// Fakes of the CUDA runtime's functions that page-lock memory, which fog looks up in torch's library for CUDA. They count.
#include <cstddef>
#include <iterator>
#include <map>
#include <mutex>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kInvalidValue = 1; // cudaErrorInvalidValue
constexpr int kAlreadyLocked = 712; // cudaErrorHostMemoryAlreadyRegistered

std::mutex mutex;
std::map<char*, size_t> locked; // lengths by begin
int refusal = 0;
thread_local int last_error = 0;

int ended(int error) {
  if (error != 0) {
    last_error = error;
  }
  return error;
}

} // namespace

EXPORT int cudaHostRegister(void* memory, size_t bytes, unsigned /*flags*/) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (refusal != 0) {
    return ended(refusal);
  }
  auto* const begin = static_cast<char*>(memory);
  const auto next = locked.lower_bound(begin);
  if (next != locked.end() && next->first < begin + bytes) {
    return ended(kAlreadyLocked);
  }
  if (next != locked.begin() && std::prev(next)->first + std::prev(next)->second > begin) {
    return ended(kAlreadyLocked);
  }
  locked[begin] = bytes;
  return 0;
}

EXPORT int cudaHostUnregister(void* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  return ended(locked.erase(static_cast<char*>(memory)) == 1 ? 0 : kInvalidValue);
}

EXPORT int cudaGetLastError() {
  const int error = last_error;
  last_error = 0;
  return error;
}

// Sets the result of later calls of cudaHostRegister; with 0 it locks memory.
EXPORT void device_double_refuse(int error) {
  const std::lock_guard<std::mutex> lock(mutex);
  refusal = error;
}

// Returns the number of page-locked pieces of memory.
EXPORT long device_double_locked() {
  const std::lock_guard<std::mutex> lock(mutex);
  return static_cast<long>(locked.size());
}
