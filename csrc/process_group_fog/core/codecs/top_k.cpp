// The k elements of largest magnitude, exactly or in few bits; the others decode to 0.
//
// Error with exact values: for the whole tensor, ||d - x||^2 <= (1 - k / numel) ||x||^2, and for an element that is not
// sent |x|, at most the k-th largest magnitude (S. U. Stich, J.-B. Cordonnier and M. Jaggi, "Sparsified SGD with memory",
// NeurIPS 2018). NaN counts as larger than infinity, and infinity as larger than all numbers; of equal magnitudes the
// first ones are sent. So up to k of them arrive as they are; more are not sent, and decode to 0.
//
// In 2 bits, values have the errors below, and ||d - x|| <= ||x|| for the whole tensor. (2 bits of the top k, with error
// feedback: A. Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", 2025.)
//
// A message is the values in the order of their places (in their own bits, or 2), and then the places (places.hpp).
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "core/codecs/codecs.hpp"
#include "core/codecs/conversions.hpp"
#include "core/codecs/places.hpp"

namespace fog::codecs {
namespace {

// --- the values of a message: as they are, or in 2 bits ---
//
// As they are, each takes its dtype's bytes. In 2 bits, the values are cut into blocks, in the order of their places. A
// block is two floats, `low` and `high`, and then a code for each value: its higher bit is the sign, and the lower one
// chooses the magnitude. `low` and `high` are the means of the magnitudes up to the mean of all and above it; but `low`
// is 0 if a magnitude is. So zeros stay zeros, and the norm of a block's error is at most that of the block. A block with
// a NaN or an infinity becomes NaN as a whole.

constexpr size_t kBlock = 512;
constexpr size_t kHeader = 2 * sizeof(float);
constexpr int kBits = 2; // of a code
constexpr int kExact = 32; // the bits of values that are sent as they are, whatever the dtype

constexpr size_t kInByte = 8 / kBits; // codes, the first one in the lowest bits

using Floats = std::array<float, kBlock>;

size_t block_bytes(size_t numel) {
  return kHeader + (numel + kInByte - 1) / kInByte;
}

// Calls use() with a value of the unsigned type that has the size of the dtype's elements.
template <typename Use>
auto with_item(c10::ScalarType dtype, Use use) {
  switch (c10::elementSize(dtype)) {
    case 2:
      return use(uint16_t());
    case 4:
      return use(uint32_t());
    default:
      return use(uint64_t());
  }
}

// The magnitudes that codes stand for.
struct Range {
  float low;
  float high;
};

// The means of the magnitudes up to `middle` and above it; the first of both if there is none above.
Range means_around(const float* magnitudes, size_t numel, double middle) {
  std::array<double, 2> sums = {};
  std::array<size_t, 2> counts = {};
  for (size_t i = 0; i < numel; ++i) {
    const size_t side = magnitudes[i] > middle ? 1 : 0;
    sums[side] += magnitudes[i];
    ++counts[side];
  }
  const double low = counts[0] > 0 ? sums[0] / static_cast<double>(counts[0]) : middle;
  return {static_cast<float>(low), static_cast<float>(counts[1] > 0 ? sums[1] / static_cast<double>(counts[1]) : low)};
}

double mean_of(const float* values, size_t numel) {
  double sum = 0;
  for (size_t i = 0; i < numel; ++i) {
    sum += values[i];
  }
  return sum / static_cast<double>(numel);
}

void encode_block(const float* in, size_t numel, uint8_t* out) {
  Floats magnitudes;
  bool finite = true;
  bool has_zeros = false;
  for (size_t i = 0; i < numel; ++i) {
    magnitudes[i] = std::fabs(in[i]);
    finite = finite && std::isfinite(in[i]);
    has_zeros = has_zeros || in[i] == 0;
  }
  const double middle = mean_of(magnitudes.data(), numel);
  auto range = means_around(magnitudes.data(), numel, middle);
  if (!finite) {
    range.low = range.high = std::numeric_limits<float>::quiet_NaN();
  } else if (has_zeros) {
    range.low = 0; // so that zeros stay zeros
  }
  std::memset(out, 0, block_bytes(numel));
  std::memcpy(out, &range, kHeader);
  for (size_t i = 0; i < numel; ++i) {
    const int code = (finite && magnitudes[i] > middle ? 1 : 0) | (std::signbit(in[i]) ? 2 : 0);
    uint8_t& byte = out[kHeader + i / kInByte];
    byte = static_cast<uint8_t>(byte | code << (i % kInByte * kBits));
  }
}

void decode_block(const uint8_t* in, size_t numel, float* out) {
  Range range = {};
  std::memcpy(&range, in, kHeader);
  for (size_t i = 0; i < numel; ++i) {
    const int code = in[kHeader + i / kInByte] >> (i % kInByte * kBits);
    const float magnitude = (code & 1) != 0 ? range.high : range.low;
    out[i] = (code & 2) != 0 ? -magnitude : magnitude;
  }
}

size_t values_bytes(c10::ScalarType dtype, size_t k, int bits) {
  if (bits == kExact) {
    return k * c10::elementSize(dtype);
  }
  const size_t rest = k % kBlock;
  return k / kBlock * block_bytes(kBlock) + (rest > 0 ? block_bytes(rest) : 0);
}

void pack_values(c10::ScalarType dtype, const void* in, const std::vector<uint64_t>& places, int bits, uint8_t* out) {
  with_item(dtype, [&](auto item) {
    using Item = decltype(item);
    const auto* from = static_cast<const Item*>(in);
    if (bits == kExact) {
      for (size_t i = 0; i < places.size(); ++i) {
        std::memcpy(out + i * sizeof(Item), from + places[i], sizeof(Item));
      }
      return;
    }
    std::array<Item, kBlock> chosen;
    Floats values;
    for (size_t begin = 0; begin < places.size(); begin += kBlock) {
      const size_t numel = std::min(kBlock, places.size() - begin);
      for (size_t i = 0; i < numel; ++i) {
        chosen[i] = from[places[begin + i]];
      }
      widen(dtype, chosen.data(), numel, values.data());
      encode_block(values.data(), numel, out);
      out += block_bytes(numel);
    }
  });
}

void unpack_values(
    c10::ScalarType dtype,
    const uint8_t* in,
    const std::vector<uint64_t>& places,
    int bits,
    size_t begin,
    size_t end,
    size_t first,
    void* out) {
  with_item(dtype, [&](auto item) {
    using Item = decltype(item);
    auto* result = static_cast<Item*>(out);
    if (bits == kExact) {
      for (size_t i = begin; i < end; ++i) {
        std::memcpy(result + (places[i] - first), in + i * sizeof(Item), sizeof(Item));
      }
      return;
    }
    Floats values;
    std::array<Item, kBlock> narrowed;
    for (size_t block = begin / kBlock; block * kBlock < end; ++block) {
      const size_t before = block * kBlock;
      const size_t numel = std::min(kBlock, places.size() - before);
      decode_block(in + block * block_bytes(kBlock), numel, values.data());
      narrow(dtype, values.data(), numel, narrowed.data());
      for (size_t i = std::max(begin, before); i < std::min(end, before + numel); ++i) {
        result[places[i] - first] = narrowed[i - before];
      }
    }
  });
}

// --- the places ---

constexpr int kDigit = 11; // bits that one pass over the tensor finds; its counts stay in the first-level cache

// The places of the `k` largest magnitudes. The bits of a magnitude, as a whole number, have the order of magnitudes.
// `Bits` is the unsigned type of an element.
template <typename Bits>
std::vector<uint64_t> find_largest(const Bits* in, size_t numel, size_t k) {
  constexpr int kWidth = 8 * sizeof(Bits) - 1; // without the sign
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits(0)) >> 1;
  // Finds the k-th largest magnitude digit by digit, from the highest: the elements with the digits found so far are
  // counted by their next digit.
  Bits found = 0;
  size_t wanted = k; // of the elements with these digits
  for (int left = kWidth; left > 0;) {
    const int digit = std::min(left, kDigit);
    left -= digit;
    std::array<size_t, size_t(1) << kDigit> counts = {};
    const int above = left + digit;
    const Bits mask = static_cast<Bits>((Bits(1) << digit) - 1);
    for (size_t i = 0; i < numel; ++i) {
      const Bits magnitude = in[i] & kMagnitude;
      if (above == kWidth || (magnitude >> above) == (found >> above)) {
        ++counts[(magnitude >> left) & mask];
      }
    }
    size_t value = mask;
    for (; counts[value] < wanted; --value) {
      wanted -= counts[value];
    }
    found = static_cast<Bits>(found | static_cast<Bits>(static_cast<Bits>(value) << left));
  }
  std::vector<uint64_t> places;
  places.reserve(k);
  for (size_t i = 0; i < numel; ++i) {
    const Bits magnitude = in[i] & kMagnitude;
    if (magnitude >= found && (magnitude > found || wanted > 0)) {
      wanted -= magnitude == found ? 1 : 0;
      places.push_back(i);
    }
  }
  return places;
}

// The fewest digits that read back as the same number.
template <typename Number>
std::string number_text(Number number) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  return {digits.data(), end};
}

std::string text_of(double fraction, int64_t k, int bits) {
  const auto share = k > 0 ? "k=" + number_text(k) : "fraction=" + number_text(fraction);
  return "TopK(" + share + (bits == kExact ? ")" : ", bits=" + std::to_string(bits) + ')');
}

class TopK final : public Codec {
 public:
  TopK(double fraction, int64_t k, int bits)
      : Codec(text_of(fraction, k, bits)), fraction_(fraction), k_(static_cast<size_t>(std::max<int64_t>(k, 0))), bits_(bits) {
    TORCH_CHECK_VALUE(k >= 0, "k: got ", k, "; allowed is 1 or more");
    TORCH_CHECK_VALUE(k > 0 || (fraction > 0 && fraction <= 1), "fraction: got ", fraction, "; allowed is more than 0 and at most 1");
    TORCH_CHECK_VALUE(bits == kBits || bits == kExact, "bits: got ", bits, "; allowed are ", kBits, " and ", kExact);
  }

  size_t bytes(c10::ScalarType dtype, size_t numel) const override {
    return values_size(dtype, numel) + places_bytes(numel, count(numel));
  }

  Unit unit(c10::ScalarType) const override {
    return {0, 0};
  }

  void encode(c10::ScalarType dtype, const void* in, size_t numel, uint8_t* out) const override {
    if (numel == 0) {
      return;
    }
    const auto places = find(dtype, in, numel);
    pack_values(dtype, in, places, bits_, out);
    pack_places(places, numel, out + values_size(dtype, numel));
  }

  Places open(c10::ScalarType dtype, size_t numel, const uint8_t* message) const override {
    return unpack_places(message + values_size(dtype, numel), numel, count(numel));
  }

  void decode(
      c10::ScalarType dtype, size_t, const Places& places, const uint8_t* data, size_t first, size_t count, void* out) const override {
    if (count == 0) {
      return;
    }
    std::memset(out, 0, count * c10::elementSize(dtype));
    const auto from = std::lower_bound(places.begin(), places.end(), first);
    const auto to = std::lower_bound(from, places.end(), first + count);
    unpack_values(
        dtype, data, places, bits_, static_cast<size_t>(from - places.begin()), static_cast<size_t>(to - places.begin()), first, out);
  }

 private:
  // The number of elements that are sent of `numel`: none of none, otherwise at least one.
  size_t count(size_t numel) const {
    return std::min(numel, k_ > 0 ? k_ : static_cast<size_t>(std::ceil(fraction_ * static_cast<double>(numel))));
  }

  size_t values_size(c10::ScalarType dtype, size_t numel) const {
    return values_bytes(dtype, count(numel), bits_);
  }

  Places find(c10::ScalarType dtype, const void* in, size_t numel) const {
    return with_item(dtype, [&](auto item) { return find_largest(static_cast<const decltype(item)*>(in), numel, count(numel)); });
  }

  const double fraction_;
  const size_t k_;
  const int bits_;
};

} // namespace

CodecPtr top_k(double fraction, int64_t k, int bits) {
  return std::make_shared<TopK>(fraction, k, bits);
}

} // namespace fog::codecs
