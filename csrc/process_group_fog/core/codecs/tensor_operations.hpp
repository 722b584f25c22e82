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

// --- blocks: the rows of a matrix of float32; scales are a column ---

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

// As largest() and scale_for().
at::Tensor largest_of_rows(const at::Tensor& rows);
at::Tensor scales_for(const at::Tensor& largest, float top);

// The bytes of blocks that are a scale and then codes. The codes of a scale that is NaN become 0.
void store_blocks(const at::Tensor& out, const at::Tensor& scales, const at::Tensor& codes);
at::Tensor load_scales(const at::Tensor& in);

// Adds up the parts of dimension 1, from the first to the last one.
at::Tensor sum_in_order(const at::Tensor& terms);

// As Pack and Unpack: codes of 1, 2, 4 or 8 bits, of dtype uint8, `numel` in a row.
at::Tensor pack_rows(const at::Tensor& codes, int bits);
at::Tensor unpack_rows(const at::Tensor& packed, int bits, int64_t numel);

// --- places, of dtype int64 and ascending ---

// As pack_places() and unpack_places(); the latter does not check the bytes.
void pack_places(const at::Tensor& places, int64_t numel, const at::Tensor& out);
at::Tensor unpack_places(const at::Tensor& in, int64_t numel, int64_t k);

} // namespace fog::codecs
