// A mutex between two processes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fog {

// Lives in memory that both processes have mapped; all zero is free. Fair: whoever unlocks while the other side waits hands
// the mutex over, so neither side gets it twice while the other one waits. A process is one side: its threads settle among
// themselves who acts for it. Sleeping is by futex.
class PairMutex {
 public:
  enum class Side : uint32_t { kFirst = 1, kSecond = 2 };

  // Takes it if it is free. Otherwise this side waits from now on: the mutex is its own once held_by() says so, and
  // wait() sleeps until then. True if it is this side's now, also by handing over.
  bool lock_or_queue(Side side);
  // Takes it if it is free; does not wait.
  bool try_lock(Side side);
  // Until it is handed to this side, or for `limit`; may return early. True if it is this side's now.
  bool wait(Side side, std::chrono::nanoseconds limit);
  // Ends this side's waiting. False if the mutex was handed over meanwhile: it is this side's then.
  bool give_up(Side side);
  // Nothing if it is not this side's any more.
  void unlock(Side side);
  // Takes it from the other side, whose process has ended or must not be waited for. Whoever waits has to queue again.
  void seize(Side side);

  bool held_by(Side side) const {
    return (state_.load(std::memory_order_acquire) & kHolder) == static_cast<uint32_t>(side);
  }

 private:
  static constexpr uint32_t kHolder = 3; // a Side, or 0
  // Set while that side waits.
  static constexpr uint32_t waits(Side side) {
    return static_cast<uint32_t>(side) << 2;
  }
  static constexpr Side other(Side side) {
    return side == Side::kFirst ? Side::kSecond : Side::kFirst;
  }

  std::atomic<uint32_t> state_;
};

} // namespace fog
