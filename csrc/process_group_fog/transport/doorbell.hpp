// How a process sleeps until another process, or another of its own threads, has something for it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fog {

// Lives in memory that all processes which ring it share; all zero is a valid start. Whoever has published something calls
// ring(), which costs no system call unless somebody sleeps. Sleeping is by futex: no core is used.
//
// There are two kinds of listeners, so that the thread which waits for a result is woken rather than the one that looks
// after operations nobody waits for.
struct Doorbell {
  enum Listener : uint32_t { kWaiter = 0, kBackground = 1 };

  alignas(64) std::atomic<uint32_t> listening; // a bit for each kind
  std::atomic<uint32_t> rung[2]; // futex words: how often a kind was woken

  // Wakes a waiter if one listens, else the background if that listens. Call after publishing.
  void ring();
  // Wakes every listener of this kind, whether it has said that it listens or not; false if none slept.
  bool wake(Listener listener);

  // The first half of going to sleep. Afterwards look once more for what would be missed, then sleep() with the result.
  uint32_t listen(Listener listener);
  void stop_listening(Listener listener) {
    const uint32_t bit = 1U << listener;
    if ((listening.load() & bit) != 0) { // else the line stays where others have it, who look at it with each message
      listening.fetch_and(~bit);
    }
  }
  // Sleeps until woken after the listen() that gave `ticket`, or for `limit`; may return early.
  void sleep(Listener listener, uint32_t ticket, std::chrono::nanoseconds limit);
};

} // namespace fog
