#include "windows/slot.hpp"

#include <algorithm>

namespace fog {

uint64_t Slot::pack(const State& state) {
  static_assert(2 * kBits + kVersionBits + 32 == 64);
  return uint64_t(state.latest) | uint64_t(state.read) << kBits | uint64_t(state.version) << (2 * kBits) | uint64_t(state.change) << 32;
}

Slot::State Slot::unpack(uint64_t word) {
  constexpr uint64_t kField = (1U << kBits) - 1;
  return {
      static_cast<unsigned>(word & kField), static_cast<unsigned>(word >> kBits & kField),
      static_cast<uint32_t>(word >> (2 * kBits) & kMostVersions), static_cast<uint32_t>(word >> 32)};
}

bool Slot::change(State& seen, State next) {
  next.change = next.latest == seen.latest ? seen.change : seen.change + 1;
  uint64_t word = pack(seen);
  if (word_.compare_exchange_weak(word, pack(next), std::memory_order_acq_rel, std::memory_order_acquire)) {
    return true;
  }
  seen = unpack(word);
  return false;
}

void Slot::start(std::optional<unsigned> buffer) {
  word_.store(pack({buffer.value_or(kEmpty), kNone, 0, 0}));
  for (auto& p : p_) {
    p.store(0.0);
  }
}

unsigned Slot::writers_buffer() const {
  // The owner can only begin to read the latest value, so a buffer that is free now stays free until it is published.
  const auto state = load();
  unsigned buffer = 0;
  while (buffer == state.latest || buffer == state.read) {
    ++buffer;
  }
  return buffer;
}

unsigned Slot::owners_buffer() const {
  const unsigned buffer = load().latest == kWriters ? kWriters + 1 : kWriters;
  // The writer may still read this buffer to add to it, but it will notice that the state has changed, even if it has
  // read data that is written from now on. Pairs with the fence in add().
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return buffer;
}

void Slot::put(unsigned buffer, std::optional<double> p, uint64_t versions) {
  auto seen = load();
  while (true) {
    // If the state changes meanwhile, the loop stores p again.
    p_[buffer].store(p ? *p : p_[seen.latest].load(std::memory_order_relaxed), std::memory_order_relaxed);
    auto next = seen;
    next.latest = buffer;
    next.version = static_cast<uint32_t>(std::min<uint64_t>(seen.version + versions, kMostVersions));
    if (change(seen, next)) {
      return;
    }
  }
}

Slot::View Slot::base() const {
  const auto state = load();
  return {state.latest, state.latest >= kEmpty, p_[state.latest].load(std::memory_order_relaxed), state.change};
}

bool Slot::add(unsigned buffer, double p, const View& base) {
  // Orders the reads of the base before this; pairs with the fence in owners_buffer().
  std::atomic_thread_fence(std::memory_order_acquire);
  p_[buffer].store(p, std::memory_order_relaxed);
  auto seen = load();
  while (seen.change == base.change) {
    auto next = seen;
    next.latest = buffer;
    if (change(seen, next)) {
      return true;
    }
  }
  return false;
}

Slot::View Slot::pin(bool take, bool take_p) {
  auto seen = load();
  while (true) {
    auto next = seen;
    const bool empty = seen.latest >= kEmpty;
    const double p = p_[seen.latest].load(std::memory_order_relaxed);
    next.version = 0;
    next.read = empty ? kNone : seen.latest;
    if (take && (!empty || (take_p && p != 0))) {
      next.latest = seen.latest == kEmpty ? kEmpty + 1 : kEmpty;
      p_[next.latest].store(take_p ? 0.0 : p, std::memory_order_relaxed);
    }
    if (change(seen, next)) {
      return {seen.latest, empty, p, seen.change};
    }
  }
}

void Slot::unpin() {
  word_.fetch_or(uint64_t(kNone) << kBits, std::memory_order_release);
}

void Slot::reset_version() {
  auto seen = load();
  while (seen.version != 0) {
    auto next = seen;
    next.version = 0;
    if (change(seen, next)) {
      return;
    }
  }
}

uint32_t Slot::version() const {
  return load().version;
}

double Slot::p() const {
  // If the value is published twice meanwhile, the buffer may belong to another state when its p is read: then read
  // again.
  while (true) {
    const auto state = load();
    const double p = p_[state.latest].load(std::memory_order_acquire);
    if (load().change == state.change) {
      return p;
    }
  }
}

} // namespace fog
