#include "core/codecs/block_codec.hpp"

#include <algorithm>
#include <array>

#include "core/codecs/conversions.hpp"

namespace fog::codecs {
size_t BlockCodec::bytes(c10::ScalarType, size_t numel) const {
  const size_t rest = numel % block_;
  return numel / block_ * block_bytes(block_) + (rest > 0 ? block_bytes(rest) : 0);
}

Codec::Unit BlockCodec::unit(c10::ScalarType) const {
  return {block_, block_bytes(block_)};
}

void BlockCodec::encode(c10::ScalarType dtype, const void* in, size_t numel, uint8_t* out) const {
  const bool direct = dtype == c10::ScalarType::Float;
  const size_t item = c10::elementSize(dtype);
  const size_t block_size = block_bytes(block_);
  std::array<float, kMostBlock> converted;
  for (size_t begin = 0; begin < numel; begin += block_, out += block_size) {
    const size_t count = std::min(block_, numel - begin);
    const char* from = static_cast<const char*>(in) + begin * item;
    if (!direct) {
      widen(dtype, from, count, converted.data());
    }
    encode_block(direct ? reinterpret_cast<const float*>(from) : converted.data(), count, out);
  }
}

void BlockCodec::decode(c10::ScalarType dtype, size_t, const Places&, const uint8_t* data, size_t, size_t count, void* out) const {
  const bool direct = dtype == c10::ScalarType::Float;
  const size_t item = c10::elementSize(dtype);
  const size_t block_size = block_bytes(block_);
  std::array<float, kMostBlock> converted;
  for (size_t begin = 0; begin < count; begin += block_, data += block_size) {
    const size_t numel = std::min(block_, count - begin);
    char* to = static_cast<char*>(out) + begin * item;
    decode_block(data, numel, direct ? reinterpret_cast<float*>(to) : converted.data());
    if (!direct) {
      narrow(dtype, converted.data(), numel, to);
    }
  }
}

} // namespace fog::codecs
