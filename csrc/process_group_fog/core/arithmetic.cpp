#include "core/arithmetic.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <ATen/Dispatch_v2.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include "core/copy.hpp"
#include "core/instruction_set.hpp"
#include "core/names.hpp"

namespace fog {
namespace {

using RedOp = c10d::ReduceOp::RedOpType;
using Inputs = c10::ArrayRef<const void*>;
using Factors = c10::ArrayRef<double>;

template <typename T>
constexpr bool is_half = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;

// The type in which a reduction of T runs. Narrow integers wrap around in T on every step as torch's own sums do.
template <typename T>
using Accumulator = std::conditional_t<is_half<T>, float, T>;

[[noreturn]] void no_kernel(RedOp op) {
  TORCH_INTERNAL_ASSERT(false, "fog: reduction ", static_cast<int>(op), " passed check_reduction() but has no kernel");
}

[[noreturn]] void no_kernel(c10::ScalarType dtype) {
  TORCH_INTERNAL_ASSERT(false, "fog: dtype ", dtype, " passed its check but has no kernel");
}

} // namespace
} // namespace fog

// Every CPU of the architecture has this instruction set: SSE2 on x86-64, NEON on ARM.
#define FOG_ISA portable
#define FOG_TARGET
#define FOG_VECTOR_BYTES 16
#include "core/arithmetic_kernels.hpp"
#undef FOG_ISA
#undef FOG_TARGET
#undef FOG_VECTOR_BYTES

#ifdef __x86_64__
// Every CPU with AVX2 also has F16C; torch relies on that too.
#define FOG_ISA avx2
#define FOG_TARGET __attribute__((target("avx2,f16c")))
#define FOG_VECTOR_BYTES 32
#define FOG_AVX2
#include "core/arithmetic_kernels.hpp"
#undef FOG_ISA
#undef FOG_TARGET
#undef FOG_VECTOR_BYTES
#undef FOG_AVX2
#endif

namespace fog {
namespace {

struct Kernels {
  decltype(&portable::reduce) reduce;
  decltype(&portable::weighted_sum) weighted_sum;
};

Kernels choose_kernels() {
#ifdef __x86_64__
  if (has_avx2()) { // every CPU with AVX2 also has F16C
    return {avx2::reduce, avx2::weighted_sum};
  }
#endif
  return {portable::reduce, portable::weighted_sum};
}

const Kernels& kernels() {
  static const Kernels chosen = choose_kernels();
  return chosen;
}

// A bool is one byte with the value 0 or 1, so its reductions are bitwise.
RedOp bitwise(RedOp op) {
  switch (op) {
    case RedOp::SUM:
    case RedOp::MAX:
      return RedOp::BOR;
    case RedOp::PRODUCT:
    case RedOp::MIN:
      return RedOp::BAND;
    default:
      return op;
  }
}

bool is_reducible(c10::ScalarType dtype) {
  // not floating types of 8 bits and complex ones of 16
  return c10::isIntegralType(dtype, true) || (c10::isFloatingType(dtype) && c10::elementSize(dtype) >= 2) ||
      (c10::isComplexType(dtype) && c10::elementSize(dtype) >= 8);
}

bool is_fractional(c10::ScalarType dtype) {
  return c10::isFloatingType(dtype) || c10::isComplexType(dtype);
}

// --- weighted sums for windows ---

// Results of at least this size are stored past the cache, which has no room for them ...
constexpr size_t kFarBytes = size_t(4) << 20;
// ... and results of at least this size if another core reads them, because its cache would have to give up each line
// first. Measured on two cores of AMD Zen 4: a copy of 1 MiB to memory that the other core has read takes 31 to 45 us
// past the cache. Through the cache it takes 30 us if the cores share a cache, and 400 us if they do not. To memory
// that no other core has read, it takes 40 us past the cache and 22 us through it.
constexpr size_t kFarBytesOfOthers = size_t(16) << 10;
// Bytes that are computed before they are copied past the cache. They stay in the first-level cache.
constexpr size_t kChunkBytes = size_t(8) << 10;

// Returns whether integers can be multiplied by this weight exactly.
bool is_whole(double weight) {
  // Above 2^53 the distance between neighboring doubles is more than 1.
  return std::trunc(weight) == weight && std::abs(weight) <= 9007199254740992.0;
}

template <typename T>
T round_to(double value) {
  constexpr auto kLeast = static_cast<double>(std::numeric_limits<T>::min());
  constexpr auto kMost = static_cast<double>(std::numeric_limits<T>::max()); // for 64 bits this rounds up to max() + 1
  if (std::isnan(value)) {
    return 0;
  }
  const double rounded = std::nearbyint(value);
  if (rounded <= kLeast) {
    return std::numeric_limits<T>::min();
  }
  return rounded >= kMost ? std::numeric_limits<T>::max() : static_cast<T>(rounded);
}

template <typename T>
void combine_integers(void* out, Inputs inputs, Factors weights, size_t numel) {
  auto* result = static_cast<T*>(out);
  const auto value = [&](size_t k, size_t i) { return static_cast<const T*>(inputs[k])[i]; };
  if (std::all_of(weights.begin(), weights.end(), is_whole)) {
    for (size_t i = 0; i < numel; ++i) {
      uint64_t sum = 0; // its low bits are those of the result, even on overflow
      for (size_t k = 0; k < inputs.size(); ++k) {
        sum += static_cast<uint64_t>(static_cast<int64_t>(weights[k])) * static_cast<uint64_t>(value(k, i));
      }
      result[i] = static_cast<T>(sum);
    }
    return;
  }
  for (size_t i = 0; i < numel; ++i) {
    double sum = 0;
    for (size_t k = 0; k < inputs.size(); ++k) {
      sum += weights[k] * static_cast<double>(value(k, i));
    }
    result[i] = round_to<T>(sum);
  }
}

void combine(c10::ScalarType dtype, void* out, Inputs inputs, Factors weights, size_t numel) {
  const bool integers = c10::isIntegralType(dtype, false);
  // A plain sum of two numbers has the same bits whether it is added in their type or in a wider one and then rounded.
  if ((integers || inputs.size() <= 2) && std::all_of(weights.begin(), weights.end(), [](double weight) { return weight == 1.0; })) {
    return reduce(c10d::ReduceOp::SUM, dtype, out, inputs, {}, numel);
  }
  if (!integers) {
    return weighted_sum(dtype, out, inputs, weights, false, numel);
  }
  AT_DISPATCH_V2(
      dtype, "linear_combination", AT_WRAP([&] { combine_integers<scalar_t>(out, inputs, weights, numel); }),
      AT_EXPAND(AT_INTEGRAL_TYPES_V2));
}

} // namespace

void check_reduction(RedOp op, c10::ScalarType dtype) {
  TORCH_CHECK_VALUE(
      is_reducible(dtype), "tensor: got dtype ", dtype_name(dtype),
      "; reductions allow bool, integers, float16, bfloat16, float32, float64, complex64 and complex128");
  const char* name = reduction_name(op);
  switch (op) {
    case RedOp::SUM:
      return;
    case RedOp::AVG:
      TORCH_CHECK_VALUE(dtype != c10::ScalarType::Bool, "op: got AVG for dtype bool; it allows integer, floating and complex dtypes");
      return;
    case RedOp::PREMUL_SUM:
      TORCH_CHECK_VALUE(
          is_fractional(dtype), "op: got ", name, " for dtype ", dtype_name(dtype), "; it allows floating and complex dtypes");
      return;
    case RedOp::PRODUCT: // torch refuses it for complex numbers, as these two, which have no order
    case RedOp::MIN:
    case RedOp::MAX:
      TORCH_CHECK_VALUE(
          !c10::isComplexType(dtype), "op: got ", name, " for dtype ", dtype_name(dtype),
          "; it allows bool, integer and floating dtypes");
      return;
    case RedOp::BAND:
    case RedOp::BOR:
    case RedOp::BXOR:
      TORCH_CHECK_VALUE(
          !is_fractional(dtype), "op: got ", name, " for dtype ", dtype_name(dtype), "; it allows bool and integer dtypes");
      return;
    default:
      TORCH_CHECK_VALUE(
          false, "op: got ReduceOp number ", static_cast<int>(op),
          "; allowed are SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR and PREMUL_SUM");
  }
}

void reduce(
    RedOp op,
    c10::ScalarType dtype,
    void* out,
    c10::ArrayRef<const void*> inputs,
    c10::ArrayRef<double> scales,
    size_t numel,
    size_t divisor) {
  divisor = divisor == 0 ? inputs.size() : divisor;
  switch (dtype) {
    case c10::ScalarType::Bool:
      return kernels().reduce(bitwise(op), c10::ScalarType::Byte, out, inputs, scales, numel, divisor);
    case c10::ScalarType::ComplexFloat: // its reductions act on both parts alike
      return kernels().reduce(op, c10::ScalarType::Float, out, inputs, scales, 2 * numel, divisor);
    case c10::ScalarType::ComplexDouble:
      return kernels().reduce(op, c10::ScalarType::Double, out, inputs, scales, 2 * numel, divisor);
    default:
      return kernels().reduce(op, dtype, out, inputs, scales, numel, divisor);
  }
}

void check_weighted_sum(c10::ScalarType dtype) {
  TORCH_CHECK_VALUE(
      is_reducible(dtype) && is_fractional(dtype), "tensor: got dtype ", dtype_name(dtype),
      "; neighbor averages allow float16, bfloat16, float32, float64, complex64 and complex128");
}

void weighted_sum(
    c10::ScalarType dtype, void* out, c10::ArrayRef<const void*> inputs, c10::ArrayRef<double> weights, bool mean, size_t numel) {
  switch (dtype) {
    case c10::ScalarType::ComplexFloat: // real weights act on both parts alike
      return kernels().weighted_sum(c10::ScalarType::Float, out, inputs, weights, mean, 2 * numel);
    case c10::ScalarType::ComplexDouble:
      return kernels().weighted_sum(c10::ScalarType::Double, out, inputs, weights, mean, 2 * numel);
    default:
      return kernels().weighted_sum(dtype, out, inputs, weights, mean, numel);
  }
}

void check_linear_combination(const char* op, c10::ScalarType dtype) {
  TORCH_CHECK_VALUE(
      is_reducible(dtype) && dtype != c10::ScalarType::Bool, op, ": tensor: got dtype ", dtype_name(dtype),
      "; windows allow integers, float16, bfloat16, float32, float64, complex64 and complex128");
}

void linear_combination(c10::ScalarType dtype, void* out, Inputs inputs, Factors weights, size_t numel, bool others_read) {
  const size_t itemsize = c10::elementSize(dtype);
  const size_t bytes = numel * itemsize;
  if (bytes == 0) { // the pointers may be null
    return;
  }
  if (inputs.empty()) {
    std::memset(out, 0, bytes);
    return;
  }
  const bool in_place = std::find(inputs.begin(), inputs.end(), out) != inputs.end(); // then it is in the cache already
  const bool far = !in_place && bytes >= (others_read ? kFarBytesOfOthers : kFarBytes);
  if (inputs.size() == 1 && weights[0] == 1.0) {
    if (far) {
      copy_far(out, inputs[0], bytes);
    } else if (!in_place) {
      std::memcpy(out, inputs[0], bytes);
    }
    return;
  }
  if (!far) {
    combine(dtype, out, inputs, weights, numel);
    return;
  }
  alignas(64) std::array<char, kChunkBytes> chunk;
  const size_t most = kChunkBytes / itemsize;
  std::vector<const void*> parts = inputs.vec();
  for (size_t done = 0; done < numel; done += most) {
    const size_t count = std::min(most, numel - done);
    combine(dtype, chunk.data(), parts, weights, count);
    copy_far(static_cast<char*>(out) + done * itemsize, chunk.data(), count * itemsize);
    for (auto& part : parts) {
      part = static_cast<const char*>(part) + count * itemsize;
    }
  }
}

} // namespace fog
