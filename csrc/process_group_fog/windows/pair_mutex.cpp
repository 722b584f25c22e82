#include "windows/pair_mutex.hpp"

#include "transport/futex.hpp"

namespace fog {

bool PairMutex::try_lock(Side side) {
  uint32_t state = state_.load(std::memory_order_relaxed);
  while ((state & kHolder) == 0) {
    if (state_.compare_exchange_weak(state, state | static_cast<uint32_t>(side), std::memory_order_acquire)) {
      return true;
    }
  }
  return false;
}

bool PairMutex::lock_or_queue(Side side) {
  uint32_t state = state_.load(std::memory_order_relaxed);
  while ((state & kHolder) != static_cast<uint32_t>(side)) {
    const uint32_t next = (state & kHolder) == 0 ? state | static_cast<uint32_t>(side) : state | waits(side);
    if (state_.compare_exchange_weak(state, next, std::memory_order_acquire)) {
      return (state & kHolder) == 0;
    }
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  return true;
}

bool PairMutex::wait(Side side, std::chrono::nanoseconds limit) {
  const uint32_t state = state_.load(std::memory_order_acquire);
  if ((state & kHolder) != static_cast<uint32_t>(side)) {
    futex_wait(state_, state, limit);
  }
  return held_by(side);
}

bool PairMutex::give_up(Side side) {
  uint32_t state = state_.load(std::memory_order_relaxed);
  while ((state & kHolder) != static_cast<uint32_t>(side)) {
    if (state_.compare_exchange_weak(state, state & ~waits(side), std::memory_order_acquire)) {
      return true;
    }
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  return false;
}

void PairMutex::unlock(Side side) {
  uint32_t state = state_.load(std::memory_order_relaxed);
  while ((state & kHolder) == static_cast<uint32_t>(side)) {
    const bool hand_over = (state & waits(other(side))) != 0;
    const uint32_t next = hand_over ? (state & ~(kHolder | waits(other(side)))) | static_cast<uint32_t>(other(side)) : state & ~kHolder;
    if (state_.compare_exchange_weak(state, next, std::memory_order_release)) {
      if (hand_over) {
        futex_wake(state_);
      }
      return;
    }
  }
}

void PairMutex::seize(Side side) {
  state_.store(static_cast<uint32_t>(side), std::memory_order_seq_cst);
}

} // namespace fog
