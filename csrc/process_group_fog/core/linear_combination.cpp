#include "core/linear_combination.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include <c10/util/Exception.h>

#include "core/arithmetic.hpp"
#include "core/names.hpp"
#include "core/copy.hpp"

namespace fog {
namespace {

using Inputs = c10::ArrayRef<const void*>;
using Weights = c10::ArrayRef<double>;

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
void combine_integers(void* out, Inputs inputs, Weights weights, size_t numel) {
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

void combine(c10::ScalarType dtype, void* out, Inputs inputs, Weights weights, size_t numel) {
  const bool integers = c10::isIntegralType(dtype, false);
  // A plain sum of two numbers has the same bits whether it is added in their type or in a wider one and then rounded.
  if ((integers || inputs.size() <= 2) && std::all_of(weights.begin(), weights.end(), [](double weight) { return weight == 1.0; })) {
    return reduce(c10d::ReduceOp::SUM, dtype, out, inputs, {}, numel);
  }
  if (!integers) {
    return weighted_sum(dtype, out, inputs, weights, false, numel);
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

void linear_combination(c10::ScalarType dtype, void* out, Inputs inputs, Weights weights, size_t numel, bool others_read) {
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
