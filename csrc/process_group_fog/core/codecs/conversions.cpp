#include "core/codecs/conversions.hpp"

#include <c10/util/Exception.h>

#include "core/codecs/small_floats.hpp"
#include "core/copy.hpp"

namespace fog::codecs {
namespace {

struct FromHalf {
  static FOG_LOOP void run(const uint16_t* __restrict from, size_t numel, float* __restrict to) {
    for (size_t i = 0; i < numel; ++i) {
      to[i] = float_of_half(from[i]);
    }
  }
};

struct ToHalf {
  static FOG_LOOP void run(const float* __restrict from, size_t numel, uint16_t* __restrict to) {
    for (size_t i = 0; i < numel; ++i) {
      to[i] = half_of(from[i]);
    }
  }
};

struct FromBFloat16 {
  static FOG_LOOP void run(const uint16_t* __restrict from, size_t numel, float* __restrict to) {
    for (size_t i = 0; i < numel; ++i) {
      to[i] = float_of_bfloat16(from[i]);
    }
  }
};

struct ToBFloat16 {
  static FOG_LOOP void run(const float* __restrict from, size_t numel, uint16_t* __restrict to) {
    for (size_t i = 0; i < numel; ++i) {
      to[i] = bfloat16_of(from[i]);
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
      return run<FromHalf>(static_cast<const uint16_t*>(from), numel, to);
    case c10::ScalarType::BFloat16:
      return run<FromBFloat16>(static_cast<const uint16_t*>(from), numel, to);
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
      return run<ToHalf>(from, numel, static_cast<uint16_t*>(to));
    case c10::ScalarType::BFloat16:
      return run<ToBFloat16>(from, numel, static_cast<uint16_t*>(to));
    case c10::ScalarType::Double:
      return run<Cast>(from, numel, static_cast<double*>(to));
    case c10::ScalarType::Float:
      return copy_bytes(to, from, numel * sizeof(float));
    default:
      TORCH_INTERNAL_ASSERT(false, "fog: dtype ", dtype, " passed its check but has no conversion");
  }
}

} // namespace fog::codecs
