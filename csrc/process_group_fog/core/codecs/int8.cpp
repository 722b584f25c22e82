// int8: whole multiples of a scale, from -127 to 127. Each block has its own scale.
//
// A block is its scale, a float of 16 significant bits, and then the codes. The scale is the largest magnitude of the
// block divided by 127, rounded up. Error, element by element: at most scale / 2 (as D. Alistarh et al., "QSGD",
// NeurIPS 2017, but to nearest, and with the largest magnitude of a block in place of the norm). A block with a NaN or
// an infinity decodes to NaN as a whole. A block of zeros decodes to zeros; -0.0 becomes 0.0.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include <c10/util/Exception.h>

#include "core/codecs/block_codec.hpp"
#include "core/codecs/codecs.hpp"
#include "core/codecs/loops.hpp"

namespace fog::codecs {
namespace {

constexpr size_t kScaleBytes = sizeof(float);
constexpr float kTop = 127;
constexpr uint32_t kLowBits = 0xFF; // all but 16 of the 24 significant bits of a float

// The sum of this number, 1.5 * 2^23, and a smaller one is rounded to a whole number, whose lowest bits are its own.
constexpr float kWhole = 12582912.0F;

struct Largest {
  static FOG_LOOP void run(const float* __restrict in, size_t numel, int32_t* __restrict result) {
    int32_t most = 0; // of the bits, in whose order infinity and NaN come last
    for (size_t i = 0; i < numel; ++i) {
      const auto magnitude = static_cast<int32_t>(bits_of(in[i]) & 0x7FFFFFFF);
      most = magnitude > most ? magnitude : most;
    }
    *result = most;
  }
};

struct Round {
  static FOG_LOOP void run(const float* __restrict in, size_t numel, float inverse, uint8_t* __restrict codes) {
    for (size_t i = 0; i < numel; ++i) {
      codes[i] = static_cast<uint8_t>(bits_of(in[i] * inverse + kWhole));
    }
  }
};

struct Restore {
  static FOG_LOOP void run(const uint8_t* __restrict codes, size_t numel, float scale, float* __restrict out) {
    for (size_t i = 0; i < numel; ++i) {
      out[i] = static_cast<float>(static_cast<int8_t>(codes[i])) * scale;
    }
  }
};

// Returns a scale for which the largest magnitude is about 127 times the scale, at least the smallest normal float, and
// NaN if an element is not finite. It has 16 significant bits and is rounded up, unless 127 times the scale would
// overflow. So products with a whole number below 2^8 are exact, and a decoded block has the same scale as before.
float scale_for(const float* in, size_t numel) {
  int32_t most = 0;
  run<Largest>(in, numel, &most);
  const float largest = float_of(static_cast<uint32_t>(most));
  if (!std::isfinite(largest)) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  const uint32_t bits = bits_of(std::max(largest / kTop, std::numeric_limits<float>::min()));
  const float scale = float_of((bits + kLowBits) & ~kLowBits);
  return std::isfinite(scale * kTop) ? scale : float_of(bits_of(scale) - (kLowBits + 1));
}

class Int8 final : public BlockCodec {
 public:
  explicit Int8(size_t block) : BlockCodec("Int8(block=" + std::to_string(block) + ')', block) {}

 protected:
  size_t block_bytes(size_t numel) const override {
    return kScaleBytes + numel;
  }

  void encode_block(const float* in, size_t numel, uint8_t* out) const override {
    const float scale = scale_for(in, numel);
    std::memcpy(out, &scale, kScaleBytes);
    if (scale != scale) {
      std::memset(out + kScaleBytes, 0, numel);
      return;
    }
    run<Round>(in, numel, 1.0F / scale, out + kScaleBytes);
  }

  void decode_block(const uint8_t* in, size_t numel, float* out) const override {
    float scale = 0;
    std::memcpy(&scale, in, kScaleBytes);
    run<Restore>(in + kScaleBytes, numel, scale, out);
  }
};

} // namespace

CodecPtr int8(int64_t block) {
  TORCH_CHECK_VALUE(
      block >= 8 && block <= static_cast<int64_t>(kMostBlock) && block % 8 == 0, "block: got ", block,
      "; allowed are multiples of 8 from 8 to ", kMostBlock);
  return std::make_shared<Int8>(block);
}

} // namespace fog::codecs
