// Lets a thread sleep until another thread, of this process or another, changes a word of shared memory.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace fog {

// Sleeps while `word` is `expected`, until woken or for `limit`. May return early.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, std::chrono::nanoseconds limit) {
  const timespec time = {static_cast<time_t>(limit.count() / 1000000000), static_cast<long>(limit.count() % 1000000000)};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

// Wakes all threads that sleep on `word`. Returns false if there were none.
inline bool futex_wake(std::atomic<uint32_t>& word) {
  return syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0) > 0;
}

} // namespace fog
