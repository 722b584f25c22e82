#include "doorbell.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace fog::shared_memory {

void Doorbell::ring() {
  // What the caller has published is visible before this looks for listeners, and a listener looks for news after it has
  // said that it listens: one of the two sees the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (listening.load(std::memory_order_relaxed) == 0) {
    return;
  }
  for (const auto listener : {kWaiter, kBackground}) {
    const uint32_t bit = 1U << listener;
    if ((listening.load() & bit) == 0) {
      continue;
    }
    if ((listening.fetch_and(~bit) & bit) == 0) {
      return; // another writer wakes it
    }
    if (wake(listener)) {
      return;
    }
    // Nobody slept: it may have listened long ago, and gone on without this. The background looks as well.
  }
}

bool Doorbell::wake(Listener listener) {
  rung[listener].fetch_add(1);
  return syscall(SYS_futex, &rung[listener], FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0) > 0;
}

uint32_t Doorbell::listen(Listener listener) {
  const uint32_t ticket = rung[listener].load();
  listening.fetch_or(1U << listener);
  return ticket;
}

void Doorbell::sleep(Listener listener, uint32_t ticket, std::chrono::nanoseconds limit) {
  const timespec time = {static_cast<time_t>(limit.count() / 1000000000), static_cast<long>(limit.count() % 1000000000)};
  syscall(SYS_futex, &rung[listener], FUTEX_WAIT, ticket, &time, nullptr, 0);
}

} // namespace fog::shared_memory
