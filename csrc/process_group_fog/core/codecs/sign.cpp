// One bit for each element, its sign, and a scale for each block.
//
// A block is its scale, a float of 16 significant bits, and then the signs. The scale is the mean magnitude m of the
// block, for which the sum of squared errors is least (F. Seide et al., "1-bit stochastic gradient descent", Interspeech
// 2014; S. P. Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019): it is the sum of squares less numel * m^2,
// up to rounding. An element's error is | |x| - m |. A block with a NaN or an infinity decodes to NaN as a whole. Zeros
// decode to plus or minus the scale.
#include <cmath>
#include <limits>
#include <string>

#include "core/codecs/block_codec.hpp"
#include "core/codecs/codecs.hpp"
#include "core/codecs/loops.hpp"
#include "core/codecs/packing.hpp"
#include "core/codecs/tensor_operations.hpp"

namespace fog::codecs {
namespace {

constexpr size_t kScaleBytes = sizeof(float);
constexpr size_t kLanes = 16;

// The sum of |in[i]| * factor, in an order that does not depend on the vectors of the CPU.
struct SumOfMagnitudes {
  static FOG_LOOP void run(const float* __restrict in, size_t numel, float factor, float* __restrict result) {
    float sums[kLanes] = {};
    size_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        sums[lane] += float_of(bits_of(in[i + lane]) & 0x7FFFFFFF) * factor;
      }
    }
    for (size_t lane = 0; i < numel; ++i, ++lane) {
      sums[lane] += float_of(bits_of(in[i]) & 0x7FFFFFFF) * factor;
    }
    for (size_t half = kLanes / 2; half > 0; half /= 2) {
      for (size_t lane = 0; lane < half; ++lane) {
        sums[lane] += sums[lane + half];
      }
    }
    *result = sums[0];
  }
};

float mean_magnitude(const float* in, size_t numel) {
  float mean = 0;
  run<SumOfMagnitudes>(in, numel, 1.0F / static_cast<float>(numel), &mean);
  if (std::isfinite(mean)) {
    const uint32_t rounded = (bits_of(mean) + 0x80) & ~uint32_t(0xFF);
    return std::isfinite(float_of(rounded)) ? float_of(rounded) : float_of(bits_of(mean) & ~uint32_t(0xFF));
  }
  // The mean of finite numbers is finite, but rounding may have made it larger than the largest one.
  return std::isfinite(largest(in, numel)) ? float_of(bits_of(std::numeric_limits<float>::max()) & ~uint32_t(0xFF))
                                           : std::numeric_limits<float>::quiet_NaN();
}

struct Signs {
  static FOG_LOOP void run(const float* __restrict in, size_t numel, uint8_t* __restrict codes) {
    for (size_t i = 0; i < numel; ++i) {
      codes[i] = static_cast<uint8_t>(bits_of(in[i]) >> 31);
    }
  }
};

struct Restore {
  static FOG_LOOP void run(const uint8_t* __restrict codes, size_t numel, float scale, float* __restrict out) {
    for (size_t i = 0; i < numel; ++i) {
      out[i] = float_of(bits_of(scale) | (uint32_t(codes[i]) << 31));
    }
  }
};

// mean_magnitude() of each row, by the same additions.
at::Tensor mean_magnitudes(const at::Tensor& rows) {
  const auto lanes = static_cast<int64_t>(kLanes);
  const int64_t steps = (rows.size(1) + lanes - 1) / lanes;
  const auto shares = rows.abs().mul_(1.0F / static_cast<float>(rows.size(1)));
  auto sums = sum_in_order(at::constant_pad_nd(shares, {0, steps * lanes - rows.size(1)}).view({-1, steps, lanes}));
  for (int64_t half = lanes / 2; half > 0; half /= 2) {
    sums = sums.narrow(1, 0, half).add(sums.narrow(1, half, half));
  }
  constexpr auto kLow = static_cast<int32_t>(kLowBits);
  const auto largest = largest_of_rows(rows);
  const auto cut = as_bits(sums).bitwise_and(~kLow);
  const auto rounded = as_bits(sums).add(0x80).bitwise_and_(~kLow);
  const auto mean = at::where(at::isfinite(as_floats(rounded)), rounded, cut);
  mean.masked_fill_(at::isfinite(sums).logical_not_(), static_cast<int32_t>(bits_of(std::numeric_limits<float>::max())) & ~kLow);
  mean.masked_fill_(at::isfinite(largest).logical_not_(), static_cast<int32_t>(bits_of(std::numeric_limits<float>::quiet_NaN())));
  return as_floats(mean);
}

class Sign : public BlockCodec {
 public:
  explicit Sign(size_t block) : BlockCodec("Sign(block=" + std::to_string(block) + ')', block) {}

 protected:
  size_t block_bytes(size_t numel) const override {
    return kScaleBytes + packed_bytes(numel, 1);
  }

  void encode_block(const float* in, size_t numel, uint8_t* out) const override {
    const float scale = mean_magnitude(in, numel);
    store_float(out, scale);
    out += kScaleBytes;
    if (scale != scale) {
      std::memset(out, 0, packed_bytes(numel, 1));
      return;
    }
    Codes codes;
    run<Signs>(in, numel, codes.data());
    run<Pack<1>>(codes.data(), numel, out);
  }

  void decode_block(const uint8_t* in, size_t numel, float* out) const override {
    Codes codes;
    run<Unpack<1>>(in + kScaleBytes, numel, codes.data());
    run<Restore>(codes.data(), numel, load_float(in), out);
  }

  void encode_rows(const at::Tensor& rows, const at::Tensor& out) const override {
    const auto values = rows.to(at::kFloat);
    store_blocks(out, mean_magnitudes(values), pack_rows(is_negative(values).to(at::kByte), 1));
  }

  at::Tensor decode_rows(const at::Tensor& in, int64_t numel) const override {
    const auto codes = unpack_rows(in.narrow(1, kScaleBytes, in.size(1) - kScaleBytes), 1, numel);
    return as_floats(codes.to(at::kInt).bitwise_left_shift_(31).bitwise_or_(as_bits(load_scales(in))));
  }
};

} // namespace

CodecPtr sign(int64_t block) {
  check_block(block);
  return std::make_shared<Sign>(block);
}

} // namespace fog::codecs
