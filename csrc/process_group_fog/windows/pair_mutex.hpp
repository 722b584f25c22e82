// A mutex between two processes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fog {

// Lives in memory that both processes have mapped; all zero means free. The mutex is fair: unlock() hands it over if
// the other side waits, so neither side gets it twice while the other one waits. A process is one side; its threads
// decide among themselves which of them uses the mutex. Waiting uses a futex.
class PairMutex {
 public:
  enum class Side : uint32_t { kFirst = 1, kSecond = 2 };

  // Takes the mutex if it is free. Otherwise this side waits from now on: it owns the mutex once held_by() says so, and
  // wait() sleeps until then. Returns whether this side owns the mutex now, also after a handover.
  bool lock_or_queue(Side side);
  // Takes the mutex if it is free; does not wait.
  bool try_lock(Side side);
  // Waits until the mutex is handed to this side, or for `limit`; may return early. Returns whether this side owns it
  // now.
  bool wait(Side side, std::chrono::nanoseconds limit);
  // Ends this side's waiting. Returns false if the mutex was handed over meanwhile: then this side owns it.
  bool give_up(Side side);
  // Does nothing if this side does not own the mutex any more.
  void unlock(Side side);
  // Takes the mutex from the other side, whose process has ended or must not be waited for. Waiting sides have to queue
  // again.
  void seize(Side side);

  bool held_by(Side side) const {
    return (state_.load(std::memory_order_acquire) & kHolder) == static_cast<uint32_t>(side);
  }

 private:
  static constexpr uint32_t kHolder = 3; // a Side, or 0
  // The bit that is set while that side waits.
  static constexpr uint32_t waits(Side side) {
    return static_cast<uint32_t>(side) << 2;
  }
  static constexpr Side other(Side side) {
    return side == Side::kFirst ? Side::kSecond : Side::kFirst;
  }

  std::atomic<uint32_t> state_;
};

} // namespace fog
