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
#include <tuple>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "core/codecs/codecs.hpp"
#include "core/codecs/conversions.hpp"
#include "core/codecs/places.hpp"
#include "core/codecs/tensor_operations.hpp"

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

// --- the same by operations of ATen: blocks are rows ---

at::Tensor whole_double(double number, const at::Tensor& like) {
  return at::full({}, number, like.options().dtype(at::kDouble)); // a division by a number would multiply by its reciprocal
}

// Adds up the parts of dimension 1, from the first to the last one.
at::Tensor sum_in_order(const at::Tensor& terms) {
  const auto parts = terms.unbind(1);
  auto sum = parts[0].clone(at::MemoryFormat::Contiguous);
  for (size_t part = 1; part < parts.size(); ++part) {
    sum.add_(parts[part]);
  }
  return sum;
}

// The columns `low` and `high`, and codes of dtype uint8 without signs. `magnitudes` are float64.
std::array<at::Tensor, 3> code_by_means(const at::Tensor& magnitudes) {
  const auto middle = sum_in_order(magnitudes).unsqueeze_(1).div_(whole_double(static_cast<double>(magnitudes.size(1)), magnitudes));
  const auto is_above = magnitudes.gt(middle);
  const auto sides = at::stack({is_above.logical_not(), is_above}, 2);
  const auto sums = sum_in_order(magnitudes.unsqueeze(2).mul(sides)); // adding 0 changes nothing
  const auto counts = sides.sum(1);
  const auto means = sums.div(counts.to(at::kDouble)).unsqueeze(1).unbind(2);
  const auto is_empty = counts.eq(0).unsqueeze(1).unbind(2);
  const auto low = at::where(is_empty[0], middle, means[0]);
  const auto high = at::where(is_empty[1], low, means[1]);
  const auto has_zeros = magnitudes.eq(0).any(1, true);
  return {low.masked_fill(has_zeros, 0), high, is_above.to(at::kByte)};
}

void encode_rows(const at::Tensor& rows, const at::Tensor& out) {
  const auto magnitudes = rows.to(at::kFloat).abs().to(at::kDouble);
  auto [low, high, codes] = code_by_means(magnitudes);
  const auto is_finite = at::isfinite(magnitudes).all(1, true);
  codes.masked_fill_(is_finite.logical_not(), 0);
  codes.bitwise_or_(is_negative(rows).to(at::kByte).bitwise_left_shift_(1));
  const auto range = as_bits(at::cat({low, high}, 1).to(at::kFloat));
  range.masked_fill_(is_finite.logical_not(), kNan);
  const auto header = static_cast<int64_t>(kHeader);
  const auto bytes = out.size(1) - header;
  out.narrow(1, 0, header).copy_(as_bytes(range));
  const auto padded =
      at::constant_pad_nd(codes, {0, static_cast<int64_t>(kInByte) * bytes - codes.size(1)}).view({-1, bytes, kInByte}).unbind(2);
  auto packed = padded[0];
  for (size_t place = 1; place < kInByte; ++place) {
    packed = packed.bitwise_or(padded[place].bitwise_left_shift(static_cast<int64_t>(place) * kBits));
  }
  out.narrow(1, header, bytes).copy_(packed);
}

at::Tensor decode_rows(const at::Tensor& in, int64_t numel) {
  const auto header = static_cast<int64_t>(kHeader);
  const auto range = from_bytes(in.narrow(1, 0, header), at::kFloat).split(1, 1);
  const auto packed = in.narrow(1, header, in.size(1) - header);
  std::array<at::Tensor, kInByte> places;
  for (size_t place = 0; place < kInByte; ++place) {
    places[place] = packed.bitwise_right_shift(static_cast<int64_t>(place) * kBits);
  }
  const auto codes = at::stack(places, 2).view({packed.size(0), -1}).narrow(1, 0, numel);
  const auto magnitudes = at::where(codes.bitwise_and(1).ne(0), range[1], range[0]);
  return at::where(codes.bitwise_and(2).ne(0), magnitudes.neg(), magnitudes);
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

void pack_values(const at::Tensor& values, int bits, const at::Tensor& out) {
  if (bits == kExact) {
    out.copy_(as_bytes(values));
    return;
  }
  const auto whole = static_cast<int64_t>(block_bytes(kBlock));
  for_sizes(values.numel(), kBlock, [&](int64_t begin, int64_t numel, int64_t blocks) {
    const auto size = static_cast<int64_t>(block_bytes(static_cast<size_t>(numel / blocks)));
    const auto bytes = out.narrow(0, begin / static_cast<int64_t>(kBlock) * whole, blocks * size);
    encode_rows(values.narrow(0, begin, numel).view({blocks, -1}), bytes.view({blocks, size}));
  });
}

at::Tensor unpack_values(const at::Tensor& in, c10::ScalarType dtype, int64_t k, int bits) {
  if (bits == kExact) {
    return from_bytes(in, dtype);
  }
  const auto values = at::empty({k}, in.options().dtype(dtype));
  const auto whole = static_cast<int64_t>(block_bytes(kBlock));
  for_sizes(k, kBlock, [&](int64_t begin, int64_t numel, int64_t blocks) {
    const auto size = static_cast<int64_t>(block_bytes(static_cast<size_t>(numel / blocks)));
    const auto bytes = in.narrow(0, begin / static_cast<int64_t>(kBlock) * whole, blocks * size);
    values.narrow(0, begin, numel).view({blocks, -1}).copy_(decode_rows(bytes.view({blocks, size}), numel / blocks));
  });
  return values;
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

  void encode_tensor(const at::Tensor& values, const at::Tensor& message) const override {
    if (values.numel() == 0) {
      return;
    }
    // at::topk() does not say which of equal elements it takes.
    const auto order = std::get<1>(at::sort(magnitude_bits(values), /*stable=*/true, /*dim=*/0, /*descending=*/true));
    const auto places = std::get<0>(at::sort(order.narrow(0, 0, static_cast<int64_t>(count(static_cast<size_t>(values.numel()))))));
    const auto [head, tail] = parts_of(message, values);
    pack_values(values.index_select(0, places), bits_, head);
    pack_places(places, values.numel(), tail);
  }

  void decode_tensor(const at::Tensor& message, const at::Tensor& out) const override {
    if (out.numel() == 0) {
      return;
    }
    const auto [head, tail] = parts_of(message, out);
    const auto places = unpack_places(tail, out.numel(), static_cast<int64_t>(count(static_cast<size_t>(out.numel()))));
    out.zero_().scatter_(0, places, unpack_values(head, out.scalar_type(), places.numel(), bits_));
  }

 private:
  // The number of elements that are sent of `numel`: none of none, otherwise at least one.
  size_t count(size_t numel) const {
    return std::min(numel, k_ > 0 ? k_ : static_cast<size_t>(std::ceil(fraction_ * static_cast<double>(numel))));
  }

  size_t values_size(c10::ScalarType dtype, size_t numel) const {
    return values_bytes(dtype, count(numel), bits_);
  }

  // The values and the places of the message of `tensor`.
  std::pair<at::Tensor, at::Tensor> parts_of(const at::Tensor& message, const at::Tensor& tensor) const {
    const auto values = static_cast<int64_t>(values_size(tensor.scalar_type(), static_cast<size_t>(tensor.numel())));
    return {message.narrow(0, 0, values), message.narrow(0, values, message.numel() - values)};
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
