#include "slot.hpp"

#include <algorithm>

namespace fog::shared_memory {

uint64_t Slot::pack(const State& state) {
  return uint64_t(state.latest) | uint64_t(state.read) << kBits | uint64_t(state.added_to) << (2 * kBits) |
      uint64_t(state.version) << (3 * kBits) | uint64_t(state.change) << (3 * kBits + kVersionBits);
}

Slot::State Slot::unpack(uint64_t word) {
  constexpr uint64_t kField = (1U << kBits) - 1;
  return {
      static_cast<unsigned>(word & kField), static_cast<unsigned>(word >> kBits & kField),
      static_cast<unsigned>(word >> (2 * kBits) & kField), static_cast<uint32_t>(word >> (3 * kBits) & kMostVersions),
      static_cast<uint32_t>(word >> (3 * kBits + kVersionBits))};
}

bool Slot::change(State& seen, State next) {
  next.change = (next.latest == seen.latest ? seen.change : seen.change + 1) % kChanges;
  uint64_t word = pack(seen);
  if (word_.compare_exchange_weak(word, pack(next), std::memory_order_acq_rel, std::memory_order_acquire)) {
    return true;
  }
  seen = unpack(word);
  return false;
}

void Slot::start(std::optional<unsigned> buffer) {
  word_.store(pack({buffer.value_or(kEmpty), kNone, kNone, 0, 0}));
  for (auto& p : p_) {
    p.store(0.0);
  }
}

unsigned Slot::writers_buffer() const {
  // The owner can only begin to read the latest value, so what is free now stays free until it is published.
  const auto state = load();
  unsigned buffer = 0;
  while (buffer == state.latest || buffer == state.read) {
    ++buffer;
  }
  return buffer;
}

unsigned Slot::owners_buffer() const {
  const auto state = load();
  unsigned buffer = kBuffersEach;
  while (buffer == state.latest || buffer == state.added_to) {
    ++buffer;
  }
  return buffer;
}

void Slot::put(unsigned buffer, std::optional<double> p) {
  auto seen = load();
  while (true) {
    // If the state is another one by now, this p is written once more.
    p_[buffer].store(p ? *p : p_[seen.latest].load(std::memory_order_relaxed), std::memory_order_relaxed);
    auto next = seen;
    next.latest = buffer;
    next.version = std::min(seen.version + 1, kMostVersions);
    if (change(seen, next)) {
      return;
    }
  }
}

Slot::View Slot::base() {
  auto seen = load();
  while (true) {
    auto next = seen;
    // Only the writer overwrites its own buffers.
    next.added_to = seen.latest >= kBuffersEach && seen.latest < kEmpty ? seen.latest : kNone;
    const double p = p_[seen.latest].load(std::memory_order_relaxed);
    if (change(seen, next)) {
      return {seen.latest, seen.latest >= kEmpty, p, seen.change};
    }
  }
}

bool Slot::add(unsigned buffer, double p, const View& base) {
  p_[buffer].store(p, std::memory_order_relaxed);
  auto seen = load();
  while (seen.change == base.change) {
    auto next = seen;
    next.latest = buffer;
    next.added_to = kNone;
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
  // The buffer may be another state's by the time its p is read, if it is published twice meanwhile: then look again.
  while (true) {
    const auto state = load();
    const double p = p_[state.latest].load(std::memory_order_acquire);
    if (load().change == state.change) {
      return p;
    }
  }
}

} // namespace fog::shared_memory
