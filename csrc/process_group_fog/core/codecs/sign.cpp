// One bit for each element, its sign, and a scale for each block.
//
// A block is its scale, a float of 16 significant bits, and then the signs. To nearest the scale is the mean magnitude
// m of the block, for which the sum of squared errors is least (F. Seide et al., "1-bit stochastic gradient descent",
// Interspeech 2014; S. P. Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019): it is the sum of squares less
// numel * m^2, up to rounding. An element's error is | |x| - m |. With stochastic rounding the scale s is the largest
// magnitude, and an element becomes s with probability (1 + x / s) / 2, so it is right on average, with errors up to
// 2 s. A block with a NaN or an infinity decodes to NaN as a whole. Zeros decode to plus or minus the scale.
#include <cmath>
#include <limits>
#include <utility>

#include "core/codecs/block_codec.hpp"
#include "core/codecs/codecs.hpp"
#include "core/codecs/loops.hpp"
#include "core/codecs/packing.hpp"

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

struct StochasticSigns {
  static FOG_LOOP void run(
      const float* __restrict in, size_t numel, float inverse, const uint16_t* __restrict random, uint8_t* __restrict codes) {
    for (size_t i = 0; i < numel; ++i) {
      const float up = (in[i] * inverse + 1.0F) * 0x1p15F;
      codes[i] = static_cast<float>(random[i]) < up ? 0 : 1;
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

class Sign : public BlockCodec {
 public:
  Sign(std::string text, size_t block, bool stochastic, uint64_t seed)
      : BlockCodec(std::move(text), block), stochastic_(stochastic), seed_(seed) {}

 protected:
  size_t block_bytes(size_t numel) const override {
    return kScaleBytes + packed_bytes(numel, 1);
  }

  void encode_block(const float* in, size_t numel, uint32_t block, const Draw& draw, uint8_t* out) const override {
    const float scale = stochastic_ ? scale_for(largest(in, numel), 1.0F) : mean_magnitude(in, numel);
    store_float(out, scale);
    out += kScaleBytes;
    if (scale != scale) {
      std::memset(out, 0, packed_bytes(numel, 1));
      return;
    }
    Codes codes;
    if (stochastic_) {
      Halves random;
      random_halves(seed_, draw, block, numel, random.data());
      run<StochasticSigns>(in, numel, 1.0F / scale, random.data(), codes.data());
    } else {
      run<Signs>(in, numel, codes.data());
    }
    run<Pack<1>>(codes.data(), numel, out);
  }

  void decode_block(const uint8_t* in, size_t numel, const float*, float* out) const override {
    Codes codes;
    run<Unpack<1>>(in + kScaleBytes, numel, codes.data());
    run<Restore>(codes.data(), numel, load_float(in), out);
  }

 private:
  const bool stochastic_;
  const uint64_t seed_;
};

} // namespace

CodecPtr sign(int64_t block, bool stochastic, uint64_t seed) {
  check_block(block);
  return std::make_shared<Sign>("Sign(" + options_text(block, stochastic, seed) + ")", block, stochastic, seed);
}

} // namespace fog::codecs
