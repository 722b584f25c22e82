// float16 and bfloat16: each element is rounded to 16 bits, to nearest, ties to even.
//
// Error, element by element: |d - x| <= 2^-11 |x| (float16, and at most 2^-25 where |x| < 2^-14) or 2^-8 |x| (bfloat16,
// and at most 2^-134 where |x| < 2^-126), with float64 rounded to float32 first, which adds 2^-24 |x|. N. J. Higham,
// "Accuracy and stability of numerical algorithms", 2nd edition, section 2.1. NaN and infinity stay what they are; a
// float16 of 65,520 or more becomes infinity.
#include <utility>

#include "core/codecs/block_codec.hpp"
#include "core/codecs/codecs.hpp"
#include "core/codecs/conversions.hpp"
#include "core/codecs/tensor_operations.hpp"

namespace fog::codecs {
namespace {

class HalfFloats : public BlockCodec {
 public:
  HalfFloats(std::string name, c10::ScalarType format) : BlockCodec(std::move(name), kTile), format_(format) {}

 protected:
  size_t block_bytes(size_t numel) const override {
    return 2 * numel;
  }
  void encode_block(const float* in, size_t numel, uint8_t* out) const override {
    narrow(format_, in, numel, out);
  }
  void decode_block(const uint8_t* in, size_t numel, float* out) const override {
    widen(format_, in, numel, out);
  }

  void encode_rows(const at::Tensor& rows, const at::Tensor& out) const override {
    const auto rounded = rows.to(at::kFloat).to(format_, false, true).view(at::kShort); // a copy in any case
    // Devices differ in the bits of a NaN that they convert.
    const auto nan = rows.ne(rows);
    const int16_t bits = format_ == at::kHalf ? 0x7E00 : 0x7FC0;
    rounded.masked_fill_(nan, bits);
    rounded.masked_fill_(nan.logical_and_(is_negative(rows)), static_cast<int16_t>(bits | 0x8000));
    out.copy_(as_bytes(rounded));
  }
  at::Tensor decode_rows(const at::Tensor& in) const override {
    return from_bytes(in, format_).to(at::kFloat);
  }

 private:
  static constexpr size_t kTile = 1024; // elements are independent: this is the unit of work only

  const c10::ScalarType format_;
};

} // namespace

CodecPtr float16() {
  return std::make_shared<HalfFloats>("Float16()", c10::ScalarType::Half);
}

CodecPtr bfloat16() {
  return std::make_shared<HalfFloats>("BFloat16()", c10::ScalarType::BFloat16);
}

} // namespace fog::codecs
