// Packs codes of 1, 2 or 4 bits into bytes.
#pragma once

#include "core/codecs/loops.hpp"

namespace fog::codecs {

constexpr size_t packed_bytes(size_t numel, int bits) {
  return (numel * static_cast<size_t>(bits) + 7) / 8;
}

// Byte j of n bytes holds the codes j, j + n, j + 2n, ... from its lowest bits up. So no loop has to move elements
// between lanes of a vector, as it would if a byte held neighbors.
template <int kBits>
struct Pack {
  static constexpr size_t kCodes = 8 / kBits; // in a byte

  // `codes` has room for kCodes - 1 codes after the last one.
  static FOG_LOOP void run(uint8_t* __restrict codes, size_t numel, uint8_t* __restrict out) {
    const size_t bytes = packed_bytes(numel, kBits);
    for (size_t i = numel; i < kCodes * bytes; ++i) {
      codes[i] = 0;
    }
    for (size_t j = 0; j < bytes; ++j) {
      uint8_t packed = codes[j];
      for (size_t c = 1; c < kCodes; ++c) {
        packed = static_cast<uint8_t>(packed | codes[j + c * bytes] << (c * kBits));
      }
      out[j] = packed;
    }
  }
};

// The reverse, with room for kCodes - 1 codes after the last one.
template <int kBits>
struct Unpack {
  static FOG_LOOP void run(const uint8_t* __restrict packed, size_t numel, uint8_t* __restrict codes) {
    constexpr uint8_t kMask = (1 << kBits) - 1;
    const size_t bytes = packed_bytes(numel, kBits);
    for (size_t c = 0; c < 8 / kBits; ++c) {
      for (size_t j = 0; j < bytes; ++j) {
        codes[j + c * bytes] = (packed[j] >> (c * kBits)) & kMask;
      }
    }
  }
};

} // namespace fog::codecs
