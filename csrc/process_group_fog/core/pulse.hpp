// The signs of life of a process. Its peers read them while they wait for it; that takes no message and wakes nobody.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace fog {

// Lives in memory that the peers of the host have mapped. All zeros is a valid initial state. The process counts its
// signs as it goes; it never wakes up for them.
struct Pulse {
  alignas(64) std::atomic<uint64_t> beats; // rounds of the engine: it goes on while the program computes or hangs
  std::atomic<uint64_t> calls; // by the program: operations submitted, waits begun and ended, windows' calls
  std::atomic<uint32_t> waiting; // threads of the program that wait in fog, so that they make no calls
  std::atomic<uint32_t> suspended; // reasons not to judge the program now
  std::atomic<int64_t> usual; // nanoseconds: what the program usually takes between two calls, see CallGaps
  std::atomic<int64_t> oldest; // when the oldest operation in flight began, in nanoseconds of the clock; 0: none
  // Written by peers: the number of those that count this process as lost.
  alignas(64) std::atomic<uint32_t> lost_by;
  // Written by processes that want to join the job: how often one has asked for the attention of this process.
  std::atomic<uint32_t> announced;
};

// What a peer read of them at once.
struct Signs {
  uint64_t beats = 0;
  uint64_t calls = 0;
  bool excused = false; // the program waits in fog, or has suspended the judgement
  std::chrono::nanoseconds usual{0};
  std::chrono::nanoseconds oldest{0}; // the age of its oldest operation; 0: it has none
};

inline Signs read_signs(const Pulse& pulse, std::chrono::steady_clock::time_point now) {
  const auto oldest = pulse.oldest.load(std::memory_order_relaxed);
  const auto age = now.time_since_epoch() - std::chrono::nanoseconds(oldest);
  return {
      pulse.beats.load(std::memory_order_relaxed), pulse.calls.load(std::memory_order_relaxed),
      pulse.waiting.load(std::memory_order_relaxed) > 0 || pulse.suspended.load(std::memory_order_relaxed) > 0,
      std::chrono::nanoseconds(pulse.usual.load(std::memory_order_relaxed)),
      oldest == 0 ? std::chrono::nanoseconds(0) : std::chrono::nanoseconds(age)};
}

} // namespace fog
