// int8 and int4: whole multiples of a scale, from -127 to 127 or -7 to 7. Each block has its own scale.
//
// A block is its scale, a float of 16 significant bits, and then the codes. The scale is the largest magnitude of the
// block divided by 127 or 7, rounded up. Error, element by element: at most scale / 2 (as D. Alistarh et al.,
// "QSGD", NeurIPS 2017, but to nearest, and with the largest magnitude of a block in place of the norm). A block with a
// NaN or an infinity decodes to NaN as a whole. A block of zeros decodes to zeros; -0.0 becomes 0.0.
#include <string>

#include <c10/util/Exception.h>

#include "core/codecs/block_codec.hpp"
#include "core/codecs/codecs.hpp"
#include "core/codecs/loops.hpp"
#include "core/codecs/packing.hpp"
#include "core/codecs/tensor_operations.hpp"

namespace fog::codecs {
namespace {

constexpr size_t kScaleBytes = sizeof(float);

// The sum of this number, 1.5 * 2^23, and a smaller one is rounded to a whole number, whose lowest bits are its own.
constexpr float kWhole = 12582912.0F;

// A code is the whole number plus an offset of 8 for 4 bits, so that codes are positive.
template <int kBits>
constexpr int kOffset = kBits == 8 ? 0 : 8;

template <int kBits>
struct Round {
  static FOG_LOOP void run(const float* __restrict in, size_t numel, float inverse, uint8_t* __restrict codes) {
    for (size_t i = 0; i < numel; ++i) {
      codes[i] = static_cast<uint8_t>(bits_of(in[i] * inverse + kWhole) + kOffset<kBits>);
    }
  }
};

template <int kBits>
struct Restore {
  static FOG_LOOP void run(const uint8_t* __restrict codes, size_t numel, float scale, float* __restrict out) {
    for (size_t i = 0; i < numel; ++i) {
      const int32_t whole = kBits == 8 ? static_cast<int8_t>(codes[i]) : codes[i] - kOffset<kBits>;
      out[i] = static_cast<float>(whole) * scale;
    }
  }
};

template <int kBits>
class Integers : public BlockCodec {
 public:
  explicit Integers(size_t block) : BlockCodec((kBits == 8 ? "Int8(block=" : "Int4(block=") + std::to_string(block) + ')', block) {}

 protected:
  size_t block_bytes(size_t numel) const override {
    return kScaleBytes + packed_bytes(numel, kBits);
  }

  void encode_block(const float* in, size_t numel, uint8_t* out) const override {
    const float scale = scale_for(largest(in, numel), (1 << (kBits - 1)) - 1);
    store_float(out, scale);
    out += kScaleBytes;
    if (scale != scale) {
      std::memset(out, 0, packed_bytes(numel, kBits));
      return;
    }
    Codes codes;
    run<Round<kBits>>(in, numel, 1.0F / scale, kBits == 8 ? out : codes.data());
    if constexpr (kBits != 8) {
      run<Pack<kBits>>(codes.data(), numel, out);
    }
  }

  void decode_block(const uint8_t* in, size_t numel, float* out) const override {
    const float scale = load_float(in);
    const uint8_t* source = in + kScaleBytes;
    Codes codes;
    if constexpr (kBits != 8) {
      run<Unpack<kBits>>(source, numel, codes.data());
      source = codes.data();
    }
    run<Restore<kBits>>(source, numel, scale, out);
  }

  void encode_rows(const at::Tensor& rows, const at::Tensor& out) const override {
    const auto given = rows.to(at::kFloat);
    const auto scale = scales_for(largest_of_rows(given), (1 << (kBits - 1)) - 1);
    const auto whole = as_bits(given.mul(scale.reciprocal()).add(kWhole)).sub(static_cast<int32_t>(bits_of(kWhole)));
    const auto codes = whole.add_(kOffset<kBits>).bitwise_and_(0xFF).to(at::kByte);
    store_blocks(out, scale, pack_rows(codes, kBits));
  }

  at::Tensor decode_rows(const at::Tensor& in, int64_t numel) const override {
    const auto codes = unpack_rows(in.narrow(1, kScaleBytes, in.size(1) - kScaleBytes), kBits, numel);
    const auto whole = kBits == 8 ? codes.view(at::kChar) : codes.to(at::kInt).sub_(kOffset<kBits>);
    return whole.to(at::kFloat).mul_(load_scales(in));
  }
};

} // namespace

CodecPtr integers(int bits, int64_t block) {
  TORCH_CHECK_VALUE(bits == 8 || bits == 4, "bits: got ", bits, "; allowed are 4 and 8");
  check_block(block);
  if (bits == 8) {
    return std::make_shared<Integers<8>>(block);
  }
  return std::make_shared<Integers<4>>(block);
}

} // namespace fog::codecs
