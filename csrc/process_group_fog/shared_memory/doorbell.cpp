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
  const uint32_t listeners = listening.load(std::memory_order_relaxed);
  if (listeners == 0) {
    return;
  }
  const auto listener = (listeners & (1U << kWaiter)) != 0 ? kWaiter : kBackground;
  if ((listening.fetch_and(~(1U << listener)) & (1U << listener)) != 0) { // else another writer wakes it
    wake(listener);
  }
}

void Doorbell::wake(Listener listener) {
  rung[listener].fetch_add(1);
  syscall(SYS_futex, &rung[listener], FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
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
