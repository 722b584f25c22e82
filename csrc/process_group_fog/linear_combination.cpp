#include "linear_combination.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include <c10/util/Exception.h>

#include "arithmetic.hpp"
#include "names.hpp"
#include "shared_memory/copy.hpp"

namespace fog {
namespace {

using Inputs = c10::ArrayRef<const void*>;
using Weights = c10::ArrayRef<double>;

// Copies of at least so many bytes go past the cache, which has no room for them. (Of smaller ones, too, seen with cores that
// share a cache: a put of 1 MiB takes 26 us instead of 41 in it, 43 instead of 48 if the other core has read it before.)
constexpr size_t kFarBytes = size_t(4) << 20;

bool is_whole(double weight) {
  // Beyond this neighboring doubles are further apart than 1.
  return std::trunc(weight) == weight && std::abs(weight) <= 9007199254740992.0;
}

template <typename T>
T round_to(double value) {
  constexpr auto kLeast = static_cast<double>(std::numeric_limits<T>::min());
  constexpr auto kMost = static_cast<double>(std::numeric_limits<T>::max()); // for 64 bits, one more than there is
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
void combine_integers(void* out, Inputs inputs, Weights weights, size_t numel) {
  auto* result = static_cast<T*>(out);
  const auto value = [&](size_t k, size_t i) { return static_cast<const T*>(inputs[k])[i]; };
  if (std::all_of(weights.begin(), weights.end(), is_whole)) {
    for (size_t i = 0; i < numel; ++i) {
      uint64_t sum = 0; // whose low bits are the result's, whatever overflows
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

} // namespace

void check_linear_combination(const char* op, c10::ScalarType dtype) {
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
      return;
    default:
      TORCH_CHECK_VALUE(
          false, op, ": tensor: got dtype ", dtype_name(dtype),
          "; windows allow integers, float16, bfloat16, float32, float64, complex64 and complex128");
  }
}

void linear_combination(c10::ScalarType dtype, void* out, Inputs inputs, Weights weights, size_t numel) {
  const size_t bytes = numel * c10::elementSize(dtype);
  if (inputs.empty()) {
    std::memset(out, 0, bytes);
    return;
  }
  const bool ones = std::all_of(weights.begin(), weights.end(), [](double weight) { return weight == 1.0; });
  if (ones && inputs.size() == 1) {
    if (out != inputs[0]) {
      bytes >= kFarBytes ? shared_memory::copy_far(out, inputs[0], bytes) : shared_memory::copy_near(out, inputs[0], bytes);
    }
    return;
  }
  if (!c10::isIntegralType(dtype, false)) {
    return weighted_sum(dtype, out, inputs, weights, false, numel);
  }
  if (ones) {
    return reduce(c10d::ReduceOp::SUM, dtype, out, inputs, {}, numel);
  }
  switch (dtype) {
    case c10::ScalarType::Byte:
      return combine_integers<uint8_t>(out, inputs, weights, numel);
    case c10::ScalarType::Char:
      return combine_integers<int8_t>(out, inputs, weights, numel);
    case c10::ScalarType::Short:
      return combine_integers<int16_t>(out, inputs, weights, numel);
    case c10::ScalarType::Int:
      return combine_integers<int32_t>(out, inputs, weights, numel);
    case c10::ScalarType::Long:
      return combine_integers<int64_t>(out, inputs, weights, numel);
    case c10::ScalarType::UInt16:
      return combine_integers<uint16_t>(out, inputs, weights, numel);
    case c10::ScalarType::UInt32:
      return combine_integers<uint32_t>(out, inputs, weights, numel);
    case c10::ScalarType::UInt64:
      return combine_integers<uint64_t>(out, inputs, weights, numel);
    default:
      TORCH_INTERNAL_ASSERT(false, "fog: dtype ", dtype, " passed its check but has no kernel");
  }
}

} // namespace fog
