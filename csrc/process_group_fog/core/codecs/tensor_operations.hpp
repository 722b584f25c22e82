// What codecs do with tensors of any device, by operations of ATen. The results have the bits of the loops.
//
// None of these functions lets the host wait for the device or copies from the host's memory: numbers of the host are
// arguments of operations. So they may be captured into a graph. Floating-point operations are single operations of
// ATen, each rounded once, so that no compiler contracts two of them into one.
#pragma once

#include <cstdint>

#include <ATen/Functions.h>

namespace fog::codecs {

// --- bits ---

// Views float32 as int32 with the same bits, and the reverse.
inline at::Tensor as_bits(const at::Tensor& floats) {
  return floats.view(at::kInt);
}
inline at::Tensor as_floats(const at::Tensor& bits) {
  return bits.view(at::kFloat);
}

// The bytes of contiguous elements, as a vector or with a longer last dimension.
inline at::Tensor as_bytes(const at::Tensor& elements) {
  return elements.view(at::kByte);
}

// Returns elements of `dtype` with these bytes, in the last dimension: a view if alignment and strides allow it.
at::Tensor from_bytes(const at::Tensor& bytes, c10::ScalarType dtype);

// The sign bit, of a NaN too.
at::Tensor is_negative(const at::Tensor& floats);
// The magnitude as a whole number, whose order is that of magnitudes; infinity and NaN come last.
at::Tensor magnitude_bits(const at::Tensor& floats);
at::Tensor not_finite(const at::Tensor& floats);
constexpr int32_t kNan = 0x7FC00000; // bits of std::numeric_limits<float>::quiet_NaN()

// The blocks of a vector of `numel` elements by size: those of `block` elements, and the rest. use() gets the place and
// the number of elements of a part, and the number of its blocks.
template <typename Use>
void for_sizes(int64_t numel, int64_t block, Use use) {
  const int64_t blocks = numel / block;
  if (blocks > 0) {
    use(int64_t(0), blocks * block, blocks);
  }
  if (numel % block > 0) {
    use(blocks * block, numel % block, int64_t(1));
  }
}

// --- places, of dtype int64 and ascending ---

// As pack_places() and unpack_places(); the latter does not check the bytes.
void pack_places(const at::Tensor& places, int64_t numel, const at::Tensor& out);
at::Tensor unpack_places(const at::Tensor& in, int64_t numel, int64_t k);

} // namespace fog::codecs
