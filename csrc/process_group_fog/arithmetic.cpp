#include "arithmetic.hpp"

#include <algorithm>
#include <array>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include "names.hpp"

namespace fog {
namespace {

using RedOp = c10d::ReduceOp::RedOpType;

// Elements whose running result stays in the first-level cache while the inputs stream past it.
constexpr size_t kBlock = 1024;

template <typename T>
struct IsComplex : std::false_type {};
template <typename T>
struct IsComplex<c10::complex<T>> : std::true_type {};

template <typename T>
constexpr bool is_half = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;

// The type in which a reduction of T runs. Narrow integers wrap around in T on every step as torch's own sums do.
template <typename T>
using Accumulator = std::conditional_t<is_half<T>, float, T>;

// The type in which a weighted sum of T runs, and that of its weights.
template <typename T>
using WideAccumulator = std::conditional_t<is_half<T>, float, double>;

// C++ promotes narrow integers to int; unsigned arithmetic keeps overflow defined.
template <typename T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(static_cast<uint64_t>(static_cast<U>(a)) + static_cast<uint64_t>(static_cast<U>(b))));
  } else {
    return a + b;
  }
}

template <typename T>
T multiply(T a, T b) {
  if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(static_cast<uint64_t>(static_cast<U>(a)) * static_cast<uint64_t>(static_cast<U>(b))));
  } else {
    return a * b;
  }
}

template <typename T>
bool is_nan(T value) {
  return value != value;
}

struct Minimum {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>) {
      return is_nan(a) || a < b ? a : b;
    } else {
      return a < b ? a : b;
    }
  }
};

struct Maximum {
  template <typename T>
  T operator()(T a, T b) const {
    if constexpr (std::is_floating_point_v<T>) {
      return is_nan(a) || a > b ? a : b;
    } else {
      return a > b ? a : b;
    }
  }
};

struct Sum {
  template <typename T>
  T operator()(T a, T b) const {
    return add(a, b);
  }
};

struct Product {
  template <typename T>
  T operator()(T a, T b) const {
    return multiply(a, b);
  }
};

struct And {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(a & b);
  }
};

struct Or {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(a | b);
  }
};

struct Xor {
  template <typename T>
  T operator()(T a, T b) const {
    return static_cast<T>(a ^ b);
  }
};

struct Identity {
  template <typename A>
  A operator()(A value) const {
    return value;
  }
};

// out = finish(combine over k of prepare(k, inputs[k])), block by block. Loading a block of every input before the block is
// stored makes it safe for `out` to be one of the inputs.
template <typename T, typename A, typename Prepare, typename Combine, typename Finish>
void combine_blocks(
    void* out, const std::vector<const void*>& inputs, size_t numel, Prepare prepare, Combine combine, Finish finish) {
  auto* result = static_cast<T*>(out);
  std::array<A, kBlock> running;
  for (size_t begin = 0; begin < numel; begin += kBlock) {
    const size_t count = std::min(kBlock, numel - begin);
    const auto* first = static_cast<const T*>(inputs[0]) + begin;
    for (size_t i = 0; i < count; ++i) {
      running[i] = prepare(size_t(0), static_cast<A>(first[i]));
    }
    for (size_t k = 1; k < inputs.size(); ++k) {
      const auto* next = static_cast<const T*>(inputs[k]) + begin;
      for (size_t i = 0; i < count; ++i) {
        running[i] = combine(running[i], prepare(k, static_cast<A>(next[i])));
      }
    }
    for (size_t i = 0; i < count; ++i) {
      result[begin + i] = static_cast<T>(finish(running[i]));
    }
  }
}

template <typename T, typename Combine>
void plain(void* out, const std::vector<const void*>& inputs, size_t numel, Combine combine) {
  combine_blocks<T, Accumulator<T>>(
      out, inputs, numel, [](size_t, auto value) { return value; }, combine, Identity());
}

template <typename T>
void reduce_numbers(RedOp op, void* out, const std::vector<const void*>& inputs, const std::vector<double>& scales, size_t numel) {
  using A = Accumulator<T>;
  switch (op) {
    case RedOp::SUM:
      return plain<T>(out, inputs, numel, Sum());
    case RedOp::PRODUCT:
      return plain<T>(out, inputs, numel, Product());
    case RedOp::AVG:
      if constexpr (!std::is_integral_v<T>) {
        const A count = static_cast<A>(static_cast<double>(inputs.size()));
        return combine_blocks<T, A>(
            out, inputs, numel, [](size_t, A value) { return value; }, Sum(), [count](A value) { return value / count; });
      }
      break;
    case RedOp::PREMUL_SUM:
      if constexpr (!std::is_integral_v<T>) {
        std::vector<A> factors;
        factors.reserve(scales.size());
        for (const double scale : scales) {
          factors.push_back(static_cast<A>(scale));
        }
        return combine_blocks<T, A>(
            out, inputs, numel, [&factors](size_t k, A value) { return factors[k] * value; }, Sum(), Identity());
      }
      break;
    case RedOp::MIN:
      if constexpr (!IsComplex<T>::value) {
        return plain<T>(out, inputs, numel, Minimum());
      }
      break;
    case RedOp::MAX:
      if constexpr (!IsComplex<T>::value) {
        return plain<T>(out, inputs, numel, Maximum());
      }
      break;
    case RedOp::BAND:
      if constexpr (std::is_integral_v<T>) {
        return plain<T>(out, inputs, numel, And());
      }
      break;
    case RedOp::BOR:
      if constexpr (std::is_integral_v<T>) {
        return plain<T>(out, inputs, numel, Or());
      }
      break;
    case RedOp::BXOR:
      if constexpr (std::is_integral_v<T>) {
        return plain<T>(out, inputs, numel, Xor());
      }
      break;
    default:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "fog: reduction ", static_cast<int>(op), " passed check_reduction() but has no kernel");
}

// bool is one byte of 0 or 1.
void reduce_bool(RedOp op, void* out, const std::vector<const void*>& inputs, size_t numel) {
  switch (op) {
    case RedOp::SUM:
    case RedOp::MAX:
    case RedOp::BOR:
      return plain<uint8_t>(out, inputs, numel, Or());
    case RedOp::PRODUCT:
    case RedOp::MIN:
    case RedOp::BAND:
      return plain<uint8_t>(out, inputs, numel, And());
    case RedOp::BXOR:
      return plain<uint8_t>(out, inputs, numel, Xor());
    default:
      TORCH_INTERNAL_ASSERT(false, "fog: reduction ", static_cast<int>(op), " passed check_reduction() but has no kernel");
  }
}

bool is_reducible(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Byte:
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
    case c10::ScalarType::UInt16:
    case c10::ScalarType::UInt32:
    case c10::ScalarType::UInt64:
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexFloat:
    case c10::ScalarType::ComplexDouble:
    case c10::ScalarType::Bool:
      return true;
    default:
      return false;
  }
}

bool is_fractional(c10::ScalarType dtype) {
  return c10::isFloatingType(dtype) || c10::isComplexType(dtype);
}

template <typename T>
void weighted(void* out, const std::vector<const void*>& inputs, const std::vector<double>& weights, bool mean, size_t numel) {
  using A = WideAccumulator<T>;
  if (mean) {
    const A count = static_cast<A>(inputs.size());
    return combine_blocks<T, A>(
        out, inputs, numel, [](size_t, A value) { return value; }, Sum(), [count](A value) { return value / count; });
  }
  std::vector<A> factors;
  factors.reserve(weights.size());
  for (const double weight : weights) {
    factors.push_back(static_cast<A>(weight));
  }
  combine_blocks<T, A>(
      out, inputs, numel, [&factors](size_t k, A value) { return factors[k] * value; }, Sum(), Identity());
}

} // namespace

void check_reduction(RedOp op, c10::ScalarType dtype) {
  TORCH_CHECK_VALUE(
      is_reducible(dtype), "tensor: got dtype ", dtype_name(dtype),
      "; reductions allow bool, integers, float16, bfloat16, float32, float64, complex64 and complex128");
  const char* name = reduction_name(op);
  switch (op) {
    case RedOp::SUM:
    case RedOp::PRODUCT:
      return;
    case RedOp::AVG:
    case RedOp::PREMUL_SUM:
      TORCH_CHECK_VALUE(
          is_fractional(dtype), "op: got ", name, " for dtype ", dtype_name(dtype), "; it allows floating and complex dtypes");
      return;
    case RedOp::MIN:
    case RedOp::MAX:
      TORCH_CHECK_VALUE(
          !c10::isComplexType(dtype), "op: got ", name, " for dtype ", dtype_name(dtype),
          "; complex numbers have no order, allowed are bool, integer and floating dtypes");
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
    const std::vector<const void*>& inputs,
    const std::vector<double>& scales,
    size_t numel) {
  switch (dtype) {
#define FOG_REDUCE_CASE(Name, Type)   \
  case c10::ScalarType::Name:         \
    return reduce_numbers<Type>(op, out, inputs, scales, numel);
    FOG_REDUCE_CASE(Byte, uint8_t)
    FOG_REDUCE_CASE(Char, int8_t)
    FOG_REDUCE_CASE(Short, int16_t)
    FOG_REDUCE_CASE(Int, int32_t)
    FOG_REDUCE_CASE(Long, int64_t)
    FOG_REDUCE_CASE(UInt16, uint16_t)
    FOG_REDUCE_CASE(UInt32, uint32_t)
    FOG_REDUCE_CASE(UInt64, uint64_t)
    FOG_REDUCE_CASE(Half, c10::Half)
    FOG_REDUCE_CASE(BFloat16, c10::BFloat16)
    FOG_REDUCE_CASE(Float, float)
    FOG_REDUCE_CASE(Double, double)
    FOG_REDUCE_CASE(ComplexFloat, c10::complex<float>)
    FOG_REDUCE_CASE(ComplexDouble, c10::complex<double>)
#undef FOG_REDUCE_CASE
    case c10::ScalarType::Bool:
      return reduce_bool(op, out, inputs, numel);
    default:
      TORCH_INTERNAL_ASSERT(false, "fog: dtype ", dtype, " passed check_reduction() but has no kernel");
  }
}

void check_weighted_sum(c10::ScalarType dtype) {
  TORCH_CHECK_VALUE(
      is_reducible(dtype) && is_fractional(dtype), "tensor: got dtype ", dtype_name(dtype),
      "; neighbor averages allow float16, bfloat16, float32, float64, complex64 and complex128");
}

void weighted_sum(
    c10::ScalarType dtype,
    void* out,
    const std::vector<const void*>& inputs,
    const std::vector<double>& weights,
    bool mean,
    size_t numel) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return weighted<c10::Half>(out, inputs, weights, mean, numel);
    case c10::ScalarType::BFloat16:
      return weighted<c10::BFloat16>(out, inputs, weights, mean, numel);
    case c10::ScalarType::Float:
      return weighted<float>(out, inputs, weights, mean, numel);
    case c10::ScalarType::Double:
      return weighted<double>(out, inputs, weights, mean, numel);
    case c10::ScalarType::ComplexFloat: // real weights act on both parts alike
      return weighted<float>(out, inputs, weights, mean, 2 * numel);
    case c10::ScalarType::ComplexDouble:
      return weighted<double>(out, inputs, weights, mean, 2 * numel);
    default:
      TORCH_INTERNAL_ASSERT(false, "fog: dtype ", dtype, " passed check_weighted_sum() but has no kernel");
  }
}

} // namespace fog
