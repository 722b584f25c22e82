// Floating-point formats of 8 and 16 bits, element by element, for loops. Rounding is to nearest, ties to even.
#pragma once

#include "core/codecs/loops.hpp"

namespace fog::codecs {

// A format with a sign, `kExponent` bits of exponent and `kFraction` bits of fraction.
template <int kExponent, int kFraction>
struct SmallFloat {
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr int kShift = 23 - kFraction; // a float has 23 bits of fraction
  static constexpr uint32_t kRebias = uint32_t(127 - kBias) << 23;
  static constexpr uint32_t kSmallestNormal = kRebias + (1U << 23); // bits of the float
  // Bits of a float whose last place is the smallest subnormal number of the format.
  static constexpr uint32_t kRounder = uint32_t(127 + 1 - kBias - kFraction + 23) << 23;

  // Rounds a magnitude, the bits of a float without sign. The result is meaningless if it does not fit into the format.
  static FOG_LOOP uint32_t round(uint32_t magnitude) {
    const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(kRounder)) - kRounder;
    const uint32_t odd = (magnitude >> kShift) & 1;
    const uint32_t normal = (magnitude - kRebias + ((1U << (kShift - 1)) - 1) + odd) >> kShift;
    return choose(static_cast<int32_t>(magnitude) < static_cast<int32_t>(kSmallestNormal), subnormal, normal);
  }

  // Returns the float of a finite magnitude of this format.
  static FOG_LOOP float widen(uint32_t magnitude) {
    const uint32_t shifted = magnitude << kShift;
    // A subnormal is a fraction without a leading one: read it as a normal number, then subtract the one.
    const float subnormal = float_of(shifted + kSmallestNormal) - float_of(kSmallestNormal);
    return float_of(choose(static_cast<int32_t>(shifted) < (1 << 23), bits_of(subnormal), shifted + kRebias));
  }
};

using Half = SmallFloat<5, 10>;

// 2^16 and above become infinity; a NaN stays one.
FOG_LOOP uint16_t half_of(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const auto compared = static_cast<int32_t>(magnitude); // vectors compare signed numbers faster
  uint32_t result = Half::round(magnitude);
  result = choose(compared >= ((127 + 16) << 23), 0x7C00, result);
  result = choose(compared > 0x7F800000, 0x7E00, result);
  return static_cast<uint16_t>(((bits >> 16) & 0x8000) | result);
}

FOG_LOOP float float_of_half(uint16_t half) {
  const uint32_t magnitude = half & 0x7FFF;
  const uint32_t special = (magnitude << Half::kShift) + 2 * Half::kRebias; // infinity and NaN
  const uint32_t bits = choose(magnitude >= 0x7C00, special, bits_of(Half::widen(magnitude)));
  return float_of(bits | (uint32_t(half & 0x8000) << 16));
}

FOG_LOOP uint16_t bfloat16_of(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = 0x7FC0 | ((bits >> 16) & 0x8000);
  return static_cast<uint16_t>(static_cast<int32_t>(bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
}

FOG_LOOP float float_of_bfloat16(uint16_t value) {
  return float_of(uint32_t(value) << 16);
}

} // namespace fog::codecs
