#include "transport/doorbell.hpp"

#include "transport/futex.hpp"

namespace fog {

void Doorbell::ring() {
  // Pairs with the fence in listen(). The caller's data is visible before this reads `listening`, and a listener looks
  // for news after it has set its bit. So one of the two sides sees the other.
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
    // No listener was asleep: it may have listened earlier and gone on without this news. So try the background too.
  }
}

bool Doorbell::wake(Listener listener) {
  rung[listener].fetch_add(1);
  return futex_wake(rung[listener]);
}

uint32_t Doorbell::listen(Listener listener) {
  const uint32_t ticket = rung[listener].load();
  listening.fetch_or(1U << listener);
  std::atomic_thread_fence(std::memory_order_seq_cst); // pairs with the fence in ring(): the caller looks for news next
  return ticket;
}

void Doorbell::sleep(Listener listener, uint32_t ticket, std::chrono::nanoseconds limit) {
  futex_wait(rung[listener], ticket, limit);
}

} // namespace fog
