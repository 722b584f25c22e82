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
