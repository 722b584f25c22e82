// Finds the receive for a message in an operation with many receives. Without the index, an operation that receives
// from n ranks would need n squared comparisons.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace fog {

// A hash table of the receives' numbers with open addressing. Entries are never removed: the callback `fits` tells
// whether a receive still takes a message.
class ReceiveIndex {
 public:
  static uint64_t key(int peer, uint16_t step) {
    return static_cast<uint64_t>(static_cast<uint32_t>(peer)) << 16 | step;
  }

  // Adds the receives below `count` that it does not have yet. `key_of(i)` is the key of number i.
  template <typename KeyOf>
  void extend(size_t count, KeyOf&& key_of) {
    if (2 * count > slots_.size()) {
      slots_.assign(std::bit_ceil(4 * count), 0);
      count_ = 0;
    }
    for (; count_ < count; ++count_) {
      auto slot = first_slot(key_of(count_));
      while (slots_[slot] != 0) {
        slot = (slot + 1) & (slots_.size() - 1);
      }
      slots_[slot] = static_cast<uint32_t>(count_ + 1);
    }
  }

  // The lowest number with this key that fits. `fits` must reject numbers with other keys, which share the probe
  // sequence.
  template <typename Fits>
  std::optional<size_t> find(uint64_t key, Fits&& fits) const {
    for (auto slot = first_slot(key); slots_[slot] != 0; slot = (slot + 1) & (slots_.size() - 1)) {
      if (fits(slots_[slot] - size_t(1))) {
        return slots_[slot] - size_t(1);
      }
    }
    return std::nullopt;
  }

 private:
  size_t first_slot(uint64_t key) const {
    return (key * 0x9e3779b97f4a7c15) >> 32 & (slots_.size() - 1); // spreads consecutive keys
  }

  std::vector<uint32_t> slots_; // number + 1, or 0 if free; at least half of the slots are free
  size_t count_ = 0;
};

} // namespace fog
