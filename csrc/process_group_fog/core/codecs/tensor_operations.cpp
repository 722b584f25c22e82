#include "core/codecs/tensor_operations.hpp"

#include <limits>

#include "core/codecs/places.hpp"

namespace fog::codecs {
namespace {

at::Tensor as_integers(const at::Tensor& floats) {
  const auto size = floats.element_size();
  return floats.view(size == 2 ? at::kShort : size == 4 ? at::kInt : at::kLong);
}

// Eight bits, of dtype uint8, become a byte, the first one its lowest bit. Their number is a multiple of 8.
at::Tensor join_bits(const at::Tensor& bits) {
  const auto columns = bits.view({-1, 8}).unbind(1);
  auto bytes = columns[0].clone(at::MemoryFormat::Contiguous);
  for (int bit = 1; bit < 8; ++bit) {
    bytes.bitwise_or_(columns[static_cast<size_t>(bit)].bitwise_left_shift(bit));
  }
  return bytes;
}

at::Tensor split_bits(const at::Tensor& bytes) {
  const auto bits = at::empty({bytes.numel(), 8}, bytes.options());
  for (int bit = 0; bit < 8; ++bit) {
    bits.select(1, bit).copy_(bytes.bitwise_right_shift(bit).bitwise_and_(1));
  }
  return bits.view(-1);
}

// Bytes in which the bits at these places are set.
at::Tensor bytes_with(const at::Tensor& places, int64_t bytes) {
  return join_bits(at::zeros({8 * bytes}, places.options().dtype(at::kByte)).scatter_(0, places, 1));
}

// The places of the first `count` bits that are set.
at::Tensor set_bits(const at::Tensor& bytes, int64_t count) {
  return at::nonzero_static(split_bits(bytes), count, 0).view(-1);
}

at::Tensor counted(int64_t count, const at::Device& device) {
  return at::arange(count, at::TensorOptions(device).dtype(at::kLong));
}

} // namespace

at::Tensor from_bytes(const at::Tensor& bytes, c10::ScalarType dtype) {
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  bool fits = bytes.storage_offset() % item == 0 && bytes.stride(-1) == 1;
  for (int64_t dim = 0; dim + 1 < bytes.dim(); ++dim) {
    fits = fits && bytes.stride(dim) % item == 0;
  }
  return (fits ? bytes : bytes.clone(at::MemoryFormat::Contiguous)).view(dtype);
}

at::Tensor is_negative(const at::Tensor& floats) {
  return as_integers(floats).lt(0);
}

at::Tensor magnitude_bits(const at::Tensor& floats) {
  const int64_t sign = std::numeric_limits<int64_t>::min() >> (64 - 8 * floats.element_size());
  return as_integers(floats).bitwise_and(~sign);
}

at::Tensor not_finite(const at::Tensor& floats) {
  return at::isfinite(floats).logical_not_();
}

void pack_places(const at::Tensor& places, int64_t numel, const at::Tensor& out) {
  const auto k = places.numel();
  const PlacesForm form(static_cast<size_t>(numel), static_cast<size_t>(k));
  if (form.is_bitmap) {
    out.copy_(bytes_with(places, out.numel()));
    return;
  }
  const auto low = static_cast<int64_t>(form.low);
  if (low > 0) {
    const auto digits = counted(form.bits, places.device());
    const auto bits = places.unsqueeze(1).bitwise_right_shift(digits).bitwise_and_(1).to(at::kByte).view(-1);
    out.narrow(0, 0, low).copy_(join_bits(at::constant_pad_nd(bits, {0, 8 * low - bits.numel()})));
  }
  const auto steps = places.bitwise_right_shift(form.bits).add_(counted(k, places.device()));
  out.narrow(0, low, static_cast<int64_t>(form.high)).copy_(bytes_with(steps, static_cast<int64_t>(form.high)));
}

at::Tensor unpack_places(const at::Tensor& in, int64_t numel, int64_t k) {
  const PlacesForm form(static_cast<size_t>(numel), static_cast<size_t>(k));
  if (form.is_bitmap) {
    return set_bits(in, k);
  }
  const auto low = static_cast<int64_t>(form.low);
  auto places = set_bits(in.narrow(0, low, static_cast<int64_t>(form.high)), k);
  places.sub_(counted(k, in.device())).bitwise_left_shift_(form.bits);
  if (low > 0) {
    const auto bits = split_bits(in.narrow(0, 0, low)).narrow(0, 0, k * form.bits).view({k, form.bits}).unbind(1);
    for (int digit = 0; digit < form.bits; ++digit) {
      places.bitwise_or_(bits[static_cast<size_t>(digit)].to(at::kLong).bitwise_left_shift_(digit));
    }
  }
  return places;
}

} // namespace fog::codecs
