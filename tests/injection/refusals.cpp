// Preloaded into a process, this refuses memory in threads of one name, and new threads, when a test asks for it.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<bool> memory_armed{false};
std::atomic<long> memory_count{0}; // allocations of those threads since
std::atomic<long> memory_first{0};
std::atomic<long> memory_last{0};
char memory_thread[16];
std::atomic<bool> threads_armed{false};

bool refuses_memory() {
  if (!memory_armed.load(std::memory_order_acquire)) {
    return false;
  }
  char name[16] = {};
  if (pthread_getname_np(pthread_self(), name, sizeof(name)) != 0 || std::strcmp(name, memory_thread) != 0) {
    return false;
  }
  const long number = memory_count.fetch_add(1);
  return number >= memory_first && number < memory_last;
}

} // namespace

void* operator new(std::size_t size) {
  void* memory = refuses_memory() ? nullptr : std::malloc(size > 0 ? size : 1);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

void* operator new[](std::size_t size) {
  return operator new(size);
}

void operator delete(void* memory) noexcept {
  std::free(memory);
}

void operator delete[](void* memory) noexcept {
  std::free(memory);
}

void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}

extern "C" {

// From now on, threads of this name get `first` more allocations, and then `count` refusals.
void refuse_memory(const char* thread, long first, long count) {
  memory_armed = false;
  std::strncpy(memory_thread, thread, sizeof(memory_thread) - 1);
  memory_count = 0;
  memory_first = first;
  memory_last = first + count;
  memory_armed = true;
}

// Returns the number of allocations that these threads have asked for since then, and ends the refusals.
long allow_memory() {
  memory_armed = false;
  return memory_count;
}

void refuse_threads(int refuse) {
  threads_armed = refuse != 0;
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  if (threads_armed) {
    return EAGAIN;
  }
  static const auto create =
      reinterpret_cast<int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>(dlsym(RTLD_NEXT, "pthread_create"));
  return create(thread, attributes, run, argument);
}

} // extern "C"
