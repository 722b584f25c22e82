#include "core/codecs/conversions.hpp"

#include <c10/util/Exception.h>

#include "core/codecs/loops.hpp"
#include "core/copy.hpp"

namespace fog::codecs {
namespace {

// 16 bits of a message, which may lie at any address.
typedef uint16_t Bits16 __attribute__((aligned(1), may_alias));

// A float16 has 5 bits of exponent with bias 15 and 10 bits of fraction; a float has 8 with bias 127 and 23.
constexpr int kShift = 23 - 10;
constexpr uint32_t kRebias = uint32_t(127 - 15) << 23;
constexpr uint32_t kSmallestNormal = kRebias + (1U << 23); // bits of the float
// Bits of a float whose last place is the smallest subnormal float16.
constexpr uint32_t kRounder = uint32_t(127 + 1 - 15 - 10 + 23) << 23;

struct FromHalf {
  static FOG_LOOP void run(const Bits16* __restrict from, size_t numel, float* __restrict to) {
    for (size_t i = 0; i < numel; ++i) {
      const uint32_t magnitude = from[i] & 0x7FFF;
      const uint32_t shifted = magnitude << kShift;
      // A subnormal is a fraction without a leading one: read it as a normal number, then subtract the one.
      const uint32_t subnormal = bits_of(float_of(shifted + kSmallestNormal) - float_of(kSmallestNormal));
      const uint32_t finite = choose(static_cast<int32_t>(shifted) < (1 << 23), subnormal, shifted + kRebias);
      const uint32_t bits = choose(magnitude >= 0x7C00, shifted + 2 * kRebias, finite); // infinity and NaN, or a number
      to[i] = float_of(bits | (uint32_t(from[i] & 0x8000) << 16));
    }
  }
};

// 2^16 and above become infinity; a NaN stays one.
struct ToHalf {
  static FOG_LOOP void run(const float* __restrict from, size_t numel, Bits16* __restrict to) {
    for (size_t i = 0; i < numel; ++i) {
      const uint32_t bits = bits_of(from[i]);
      const uint32_t magnitude = bits & 0x7FFFFFFF;
      const auto compared = static_cast<int32_t>(magnitude); // vectors compare signed numbers faster
      const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(kRounder)) - kRounder;
      const uint32_t odd = (magnitude >> kShift) & 1;
      const uint32_t normal = (magnitude - kRebias + ((1U << (kShift - 1)) - 1) + odd) >> kShift;
      uint32_t result = choose(compared < static_cast<int32_t>(kSmallestNormal), subnormal, normal);
      result = choose(compared >= ((127 + 16) << 23), 0x7C00, result);
      result = choose(compared > 0x7F800000, 0x7E00, result);
      to[i] = static_cast<uint16_t>(((bits >> 16) & 0x8000) | result);
    }
  }
};

struct FromBFloat16 {
  static FOG_LOOP void run(const Bits16* __restrict from, size_t numel, float* __restrict to) {
    for (size_t i = 0; i < numel; ++i) {
      to[i] = float_of(uint32_t(from[i]) << 16);
    }
  }
};

struct ToBFloat16 {
  static FOG_LOOP void run(const float* __restrict from, size_t numel, Bits16* __restrict to) {
    for (size_t i = 0; i < numel; ++i) {
      const uint32_t bits = bits_of(from[i]);
      const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
      const uint32_t nan = 0x7FC0 | ((bits >> 16) & 0x8000);
      to[i] = static_cast<uint16_t>(static_cast<int32_t>(bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
    }
  }
};

struct Cast {
  template <typename From, typename To>
  static FOG_LOOP void run(const From* __restrict from, size_t numel, To* __restrict to) {
    for (size_t i = 0; i < numel; ++i) {
      to[i] = static_cast<To>(from[i]);
    }
  }
};

} // namespace

void widen(c10::ScalarType dtype, const void* from, size_t numel, float* to) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return run<FromHalf>(static_cast<const Bits16*>(from), numel, to);
    case c10::ScalarType::BFloat16:
      return run<FromBFloat16>(static_cast<const Bits16*>(from), numel, to);
    case c10::ScalarType::Double:
      return run<Cast>(static_cast<const double*>(from), numel, to);
    case c10::ScalarType::Float:
      return copy_bytes(to, from, numel * sizeof(float));
    default:
      TORCH_INTERNAL_ASSERT(false, "fog: dtype ", dtype, " passed its check but has no conversion");
  }
}

void narrow(c10::ScalarType dtype, const float* from, size_t numel, void* to) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return run<ToHalf>(from, numel, static_cast<Bits16*>(to));
    case c10::ScalarType::BFloat16:
      return run<ToBFloat16>(from, numel, static_cast<Bits16*>(to));
    case c10::ScalarType::Double:
      return run<Cast>(from, numel, static_cast<double*>(to));
    case c10::ScalarType::Float:
      return copy_bytes(to, from, numel * sizeof(float));
    default:
      TORCH_INTERNAL_ASSERT(false, "fog: dtype ", dtype, " passed its check but has no conversion");
  }
}

} // namespace fog::codecs
