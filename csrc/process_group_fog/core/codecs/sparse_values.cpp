#include "core/codecs/sparse_values.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include <c10/util/Exception.h>

#include "core/codecs/conversions.hpp"
#include "core/codecs/packing.hpp"
#include "core/codecs/tensor_operations.hpp"
#include "core/copy.hpp"

namespace fog::codecs {
namespace {

constexpr size_t kBlock = 512;
constexpr size_t kHeader = 2 * sizeof(float);

using Floats = std::array<float, kBlock>;
using Codes = std::array<uint8_t, kBlock + 8>;

size_t block_bytes(size_t numel, int bits) {
  return kHeader + packed_bytes(numel, bits);
}

// Calls use() with a value of the unsigned type that has the size of the dtype's elements.
template <typename Use>
void with_item(c10::ScalarType dtype, Use use) {
  switch (c10::elementSize(dtype)) {
    case 2:
      return use(uint16_t());
    case 4:
      return use(uint32_t());
    default:
      return use(uint64_t());
  }
}

void pack_codes(uint8_t* codes, size_t numel, int bits, uint8_t* out) {
  switch (bits) {
    case 2:
      return run<Pack<2>>(codes, numel, out);
    case 4:
      return run<Pack<4>>(codes, numel, out);
    default:
      copy_bytes(out, codes, numel);
  }
}

void unpack_codes(const uint8_t* in, size_t numel, int bits, uint8_t* codes) {
  switch (bits) {
    case 2:
      return run<Unpack<2>>(in, numel, codes);
    case 4:
      return run<Unpack<4>>(in, numel, codes);
    default:
      copy_bytes(codes, in, numel);
  }
}

// The least and the largest magnitude that codes stand for.
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

void encode_block(const float* in, size_t numel, int bits, uint8_t* out) {
  Floats magnitudes;
  Codes codes;
  Range range = {std::numeric_limits<float>::max(), 0};
  bool finite = true;
  for (size_t i = 0; i < numel; ++i) {
    magnitudes[i] = std::fabs(in[i]);
    finite = finite && std::isfinite(in[i]);
    range = {std::min(range.low, magnitudes[i]), std::max(range.high, magnitudes[i])};
  }
  if (!finite) {
    range.low = range.high = std::numeric_limits<float>::quiet_NaN();
    std::fill_n(codes.data(), numel, uint8_t(0));
  } else if (bits == 2) {
    const double middle = mean_of(magnitudes.data(), numel);
    const bool has_zeros = range.low == 0;
    range = means_around(magnitudes.data(), numel, middle);
    range.low = has_zeros ? 0 : range.low; // so that zeros stay zeros
    for (size_t i = 0; i < numel; ++i) {
      codes[i] = magnitudes[i] > middle ? 1 : 0;
    }
  } else {
    const double step = (double(range.high) - double(range.low)) / ((1 << (bits - 1)) - 1);
    for (size_t i = 0; i < numel; ++i) {
      codes[i] = step > 0 ? static_cast<uint8_t>((double(magnitudes[i]) - double(range.low)) / step + 0.5) : uint8_t(0);
    }
  }
  for (size_t i = 0; i < numel; ++i) {
    codes[i] = static_cast<uint8_t>(codes[i] | (std::signbit(in[i]) ? 1 << (bits - 1) : 0));
  }
  std::memcpy(out, &range, kHeader);
  pack_codes(codes.data(), numel, bits, out + kHeader);
}

void decode_block(const uint8_t* in, size_t numel, int bits, float* out) {
  Range range = {};
  std::memcpy(&range, in, kHeader);
  Codes codes;
  unpack_codes(in + kHeader, numel, bits, codes.data());
  const int count = 1 << (bits - 1);
  // In float64 the last one is `high` after rounding, so that none is larger than the values were.
  std::array<float, 128> magnitudes = {};
  for (int i = 0; i < count; ++i) {
    magnitudes[static_cast<size_t>(i)] =
        static_cast<float>(double(range.low) + (double(range.high) - double(range.low)) * i / (count - 1));
  }
  for (size_t i = 0; i < numel; ++i) {
    const float magnitude = magnitudes[codes[i] & static_cast<uint8_t>(count - 1)];
    out[i] = (codes[i] & count) != 0 ? -magnitude : magnitude;
  }
}

// --- the same by operations of ATen: blocks are rows ---

at::Tensor whole_double(double number, const at::Tensor& like) {
  return at::full({}, number, like.options().dtype(at::kDouble)); // a division by a number would multiply by its reciprocal
}

// The columns `low` and `high`, and codes of dtype uint8 without signs, for 2 bits. `magnitudes` are float64.
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

// The same for 4 and 8 bits.
std::array<at::Tensor, 3> code_by_steps(const at::Tensor& magnitudes, int bits) {
  const auto low = magnitudes.amin(1, true);
  const auto high = magnitudes.amax(1, true);
  const auto step = high.sub(low).div_(whole_double((1 << (bits - 1)) - 1, magnitudes));
  const auto places = magnitudes.sub(low).div_(step).masked_fill_(step.gt(0).logical_not_(), 0);
  return {low, high, places.add_(0.5).to(at::kByte)};
}

void encode_rows(const at::Tensor& rows, int bits, const at::Tensor& out) {
  const auto magnitudes = rows.to(at::kFloat).abs().to(at::kDouble);
  auto [low, high, codes] = bits == 2 ? code_by_means(magnitudes) : code_by_steps(magnitudes, bits);
  const auto is_finite = at::isfinite(magnitudes).all(1, true);
  codes.masked_fill_(is_finite.logical_not(), 0);
  codes.bitwise_or_(is_negative(rows).to(at::kByte).bitwise_left_shift_(bits - 1));
  const auto range = as_bits(at::cat({low, high}, 1).to(at::kFloat));
  range.masked_fill_(is_finite.logical_not(), 0x7FC00000); // std::numeric_limits<float>::quiet_NaN()
  const auto header = static_cast<int64_t>(kHeader);
  out.narrow(1, 0, header).copy_(as_bytes(range));
  out.narrow(1, header, out.size(1) - header).copy_(pack_rows(codes, bits));
}

at::Tensor decode_rows(const at::Tensor& in, int bits, int64_t numel) {
  const auto header = static_cast<int64_t>(kHeader);
  const auto range = from_bytes(in.narrow(1, 0, header), at::kFloat).to(at::kDouble).split(1, 1);
  const auto codes = unpack_rows(in.narrow(1, header, in.size(1) - header), bits, numel);
  const int count = 1 << (bits - 1);
  const auto distance = range[1].sub(range[0]).mul(codes.bitwise_and(count - 1));
  const auto magnitudes = distance.div_(whole_double(count - 1, in)).add_(range[0]).to(at::kFloat);
  return at::where(codes.bitwise_and(count).ne(0), magnitudes.neg(), magnitudes);
}

} // namespace

void check_value_bits(int bits) {
  TORCH_CHECK_VALUE(bits == 2 || bits == 4 || bits == 8 || bits == kExact, "bits: got ", bits, "; allowed are 2, 4, 8 and ", kExact);
}

size_t values_bytes(c10::ScalarType dtype, size_t k, int bits) {
  if (bits == kExact) {
    return k * c10::elementSize(dtype);
  }
  const size_t rest = k % kBlock;
  return k / kBlock * block_bytes(kBlock, bits) + (rest > 0 ? block_bytes(rest, bits) : 0);
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
      encode_block(values.data(), numel, bits, out);
      out += block_bytes(numel, bits);
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
      decode_block(in + block * block_bytes(kBlock, bits), numel, bits, values.data());
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
  const auto whole = static_cast<int64_t>(block_bytes(kBlock, bits));
  for_sizes(values.numel(), kBlock, [&](int64_t begin, int64_t numel, int64_t blocks) {
    const auto size = static_cast<int64_t>(block_bytes(static_cast<size_t>(numel / blocks), bits));
    const auto bytes = out.narrow(0, begin / static_cast<int64_t>(kBlock) * whole, blocks * size);
    encode_rows(values.narrow(0, begin, numel).view({blocks, -1}), bits, bytes.view({blocks, size}));
  });
}

at::Tensor unpack_values(const at::Tensor& in, c10::ScalarType dtype, int64_t k, int bits) {
  if (bits == kExact) {
    return from_bytes(in, dtype);
  }
  const auto values = at::empty({k}, in.options().dtype(dtype));
  const auto whole = static_cast<int64_t>(block_bytes(kBlock, bits));
  for_sizes(k, kBlock, [&](int64_t begin, int64_t numel, int64_t blocks) {
    const auto size = static_cast<int64_t>(block_bytes(static_cast<size_t>(numel / blocks), bits));
    const auto bytes = in.narrow(0, begin / static_cast<int64_t>(kBlock) * whole, blocks * size);
    values.narrow(0, begin, numel).view({blocks, -1}).copy_(decode_rows(bytes.view({blocks, size}), bits, numel / blocks));
  });
  return values;
}

} // namespace fog::codecs
