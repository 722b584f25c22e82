#include "core/codecs/sparse_codec.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>

#include <c10/util/Exception.h>

#include "core/codecs/sparse_values.hpp"
#include "core/codecs/tensor_operations.hpp"

namespace fog::codecs {
namespace {

// The fewest digits that read back as the same number.
template <typename Number>
std::string number_text(Number number) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr;
  return {digits.data(), end};
}

std::string text_of(const std::string& name, double fraction, int64_t k, const std::string& more) {
  return name + (k > 0 ? "(k=" + number_text(k) : "(fraction=" + number_text(fraction)) + more + ')';
}

} // namespace

SparseCodec::SparseCodec(const std::string& name, double fraction, int64_t k, const std::string& more, size_t prefix, int bits)
    : Codec(text_of(name, fraction, k, more)),
      fraction_(fraction),
      k_(static_cast<size_t>(std::max<int64_t>(k, 0))),
      prefix_(prefix),
      bits_(bits) {
  TORCH_CHECK_VALUE(k >= 0, "k: got ", k, "; allowed is 1 or more");
  TORCH_CHECK_VALUE(k > 0 || (fraction > 0 && fraction <= 1), "fraction: got ", fraction, "; allowed is more than 0 and at most 1");
  check_value_bits(bits);
}

size_t SparseCodec::count(size_t numel) const {
  if (k_ > 0) {
    return std::min(k_, numel);
  }
  return std::min(numel, static_cast<size_t>(std::ceil(fraction_ * static_cast<double>(numel))));
}

size_t SparseCodec::bytes(c10::ScalarType dtype, size_t numel) const {
  return numel == 0 ? 0 : prefix_ + values_bytes(dtype, count(numel), bits_) + tail_bytes(numel);
}

Codec::Unit SparseCodec::unit(c10::ScalarType) const {
  return {0, 0};
}

void SparseCodec::encode(c10::ScalarType dtype, const void* in, size_t numel, const Draw& draw, uint8_t* out, size_t) const {
  if (numel == 0) {
    return;
  }
  uint8_t* values = out + prefix_;
  const auto places = choose(dtype, in, numel, draw, out, values + values_bytes(dtype, count(numel), bits_));
  pack_values(dtype, in, places, bits_, values);
}

Codec::Places SparseCodec::open(c10::ScalarType dtype, size_t numel, const uint8_t* message) const {
  return numel == 0 ? Places() : read(numel, message, message + prefix_ + values_bytes(dtype, count(numel), bits_));
}

void SparseCodec::decode(
    c10::ScalarType dtype, size_t, const Places& places, const uint8_t* data, size_t first, size_t count, void* out) const {
  if (count == 0) {
    return;
  }
  std::memset(out, 0, count * c10::elementSize(dtype));
  const auto from = std::lower_bound(places.begin(), places.end(), first);
  const auto to = std::lower_bound(from, places.end(), first + count);
  unpack_values(
      dtype, data + prefix_, places, bits_, static_cast<size_t>(from - places.begin()), static_cast<size_t>(to - places.begin()), first,
      out);
}

SparseCodec::Parts SparseCodec::parts_of(const at::Tensor& message, c10::ScalarType dtype, int64_t numel) const {
  const auto prefix = static_cast<int64_t>(prefix_);
  const auto values = static_cast<int64_t>(values_bytes(dtype, count(static_cast<size_t>(numel)), bits_));
  const int64_t tail = prefix + values;
  return {message.narrow(0, 0, prefix), message.narrow(0, prefix, values), message.narrow(0, tail, message.numel() - tail)};
}

void SparseCodec::encode_tensor(const at::Tensor& values, const Draw& draw, const at::Tensor& message) const {
  if (values.numel() == 0) {
    return;
  }
  const auto parts = parts_of(message, values.scalar_type(), values.numel());
  const auto places = choose_places(values, draw, parts.prefix, parts.tail);
  pack_values(values.index_select(0, places), bits_, parts.values);
}

void SparseCodec::decode_tensor(const at::Tensor& message, const at::Tensor& out) const {
  if (out.numel() == 0) {
    return;
  }
  const auto parts = parts_of(message, out.scalar_type(), out.numel());
  const auto places = read_places(out.numel(), parts.prefix, parts.tail);
  out.zero_().scatter_(0, places, unpack_values(parts.values, out.scalar_type(), places.numel(), bits_));
}

} // namespace fog::codecs
