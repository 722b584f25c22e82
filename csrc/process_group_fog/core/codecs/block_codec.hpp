// The common part of the codecs that encode all elements, in blocks that are independent of each other.
#pragma once

#include <array>
#include <cstring>
#include <string>

#include "core/codecs/codec.hpp"

namespace fog::codecs {

// Blocks have 8 to kMostBlock elements, a multiple of 8, so a block and its codes stay in the first-level cache.
constexpr size_t kMostBlock = 8192;

// Throws ValueError unless blocks may have that size.
void check_block(int64_t block);

// Subclasses encode and decode one block, in float32: float64 is rounded to float32 first.
class BlockCodec : public Codec {
 public:
  size_t bytes(c10::ScalarType dtype, size_t numel) const final;
  Unit unit(c10::ScalarType dtype) const final;
  void encode(c10::ScalarType dtype, const void* in, size_t numel, uint8_t* out) const final;
  void decode(c10::ScalarType dtype, size_t numel, const Places& places, const uint8_t* data, size_t first, size_t count, void* out)
      const final;
  void encode_tensor(const at::Tensor& values, const at::Tensor& message) const final;
  void decode_tensor(const at::Tensor& message, const at::Tensor& out) const final;

 protected:
  BlockCodec(std::string text, size_t block) : Codec(std::move(text)), block_(block) {}

  // The bytes of a block of `numel` elements.
  virtual size_t block_bytes(size_t numel) const = 0;
  virtual void encode_block(const float* in, size_t numel, uint8_t* out) const = 0;
  virtual void decode_block(const uint8_t* in, size_t numel, float* out) const = 0;
  // The same for blocks of one size by operations of ATen, see encode_tensor(): each is a row of these matrices. `rows`
  // have the tensor's dtype, and `out` and `in` have the bytes of the blocks.
  virtual void encode_rows(const at::Tensor& rows, const at::Tensor& out) const = 0;
  // Returns `numel` floats for each row.
  virtual at::Tensor decode_rows(const at::Tensor& in, int64_t numel) const = 0;

 private:
  const size_t block_;
};

// Memory on the stack for the codes of a block.
using Codes = std::array<uint8_t, kMostBlock + 8>;

// --- scales ---

constexpr uint32_t kLowBits = 0xFF; // all but 16 of the 24 significant bits of a float

// The largest magnitude of a block. It is not finite if an element is not.
float largest(const float* in, size_t numel);

// Returns a scale for which `largest` is about `top` times the scale, at least the smallest normal float, and NaN if
// `largest` is not finite. It has 16 significant bits and is rounded up, unless `top` times the scale would overflow.
// So products with a whole number below 2^8 are exact, and a decoded block has the same scale as before.
float scale_for(float largest, float top);

inline void store_float(uint8_t* to, float value) {
  std::memcpy(to, &value, sizeof(value));
}
inline float load_float(const uint8_t* from) {
  float value = 0;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

} // namespace fog::codecs
