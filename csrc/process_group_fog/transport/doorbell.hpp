// Lets a process sleep until another process, or another of its own threads, has news for it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fog {

// Lives in memory that is shared by all processes that ring it. All zeros is a valid initial state. After publishing
// news, call ring(), which costs no system call unless a listener sleeps. Sleeping is by futex and uses no core.
//
// There are two kinds of listeners, so that ring() wakes the thread that waits for a result rather than the background
// thread, which serves operations without a waiting thread.
struct Doorbell {
  enum Listener : uint32_t { kWaiter = 0, kBackground = 1 };

  alignas(64) std::atomic<uint32_t> listening; // one bit per kind
  std::atomic<uint32_t> rung[2]; // futex words: the number of wake-ups of each kind

  // Wakes a waiter if one listens, otherwise the background if it listens. Call after publishing.
  void ring();
  // Wakes every sleeping listener of this kind, whether its bit is set or not. Returns false if none slept.
  bool wake(Listener listener);

  // The first half of going to sleep. After it, check once more for news, then call sleep() with the returned ticket.
  uint32_t listen(Listener listener);
  void stop_listening(Listener listener) {
    const uint32_t bit = 1U << listener;
    if ((listening.load() & bit) != 0) { // test before writing: peers read this cache line with each message
      listening.fetch_and(~bit);
    }
  }
  // Sleeps until a wake-up after the listen() that returned `ticket`, or for `limit`. May return early.
  void sleep(Listener listener, uint32_t ticket, std::chrono::nanoseconds limit);
};

} // namespace fog
