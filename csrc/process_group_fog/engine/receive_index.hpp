// Finds the receive that a message belongs to, where an operation has many: without it, n ranks that all send to one would cost it n squared
// looks.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace fog {

// A table of their numbers with open addresses. Nothing leaves it: what a number stands for says whether it still fits.
class ReceiveIndex {
 public:
  static uint64_t key(int peer, uint16_t step) {
    return static_cast<uint64_t>(static_cast<uint32_t>(peer)) << 16 | step;
  }

  // Puts in receives that it does not have yet, so that it has those below `count`. `key_of(i)` is the key of number i.
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

  // The lowest number with this key that fits; those with other keys that are on the way must not.
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
    return (key * 0x9e3779b97f4a7c15) >> 32 & (slots_.size() - 1); // keys that follow each other lie apart
  }

  std::vector<uint32_t> slots_; // a number and 1; 0: free. Half of them at least are.
  size_t count_ = 0;
};

} // namespace fog
