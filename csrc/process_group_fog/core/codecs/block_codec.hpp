// The common part of the codecs that encode all elements, in blocks that are independent of each other.
#pragma once

#include <string>

#include "core/codecs/codec.hpp"

namespace fog::codecs {

// Blocks have at most this many elements, so a block and its codes stay in the first-level cache.
constexpr size_t kMostBlock = 8192;

// Subclasses encode and decode one block, in float32: float64 is rounded to float32 first.
class BlockCodec : public Codec {
 public:
  size_t bytes(c10::ScalarType dtype, size_t numel) const final;
  Unit unit(c10::ScalarType dtype) const final;
  void encode(c10::ScalarType dtype, const void* in, size_t numel, uint8_t* out) const final;
  void decode(c10::ScalarType dtype, size_t numel, const Places& places, const uint8_t* data, size_t first, size_t count, void* out)
      const final;

 protected:
  BlockCodec(std::string text, size_t block) : Codec(std::move(text)), block_(block) {}

  // The bytes of a block of `numel` elements.
  virtual size_t block_bytes(size_t numel) const = 0;
  virtual void encode_block(const float* in, size_t numel, uint8_t* out) const = 0;
  virtual void decode_block(const uint8_t* in, size_t numel, float* out) const = 0;

 private:
  const size_t block_;
};

} // namespace fog::codecs
