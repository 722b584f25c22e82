#include "transport/doorbell.hpp"

#include "transport/futex.hpp"

namespace fog {

void Doorbell::ring() {
  // Pairs with the fence in listen(): what the caller has published is visible before this looks for listeners, and a listener
  // looks for news after it has said that it listens: one of the two sees the other.
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
  return futex_wake(rung[listener]);
}

uint32_t Doorbell::listen(Listener listener) {
  const uint32_t ticket = rung[listener].load();
  listening.fetch_or(1U << listener);
  std::atomic_thread_fence(std::memory_order_seq_cst); // pairs with that in ring(): the caller looks for news next
  return ticket;
}

void Doorbell::sleep(Listener listener, uint32_t ticket, std::chrono::nanoseconds limit) {
  futex_wait(rung[listener], ticket, limit);
}

} // namespace fog
