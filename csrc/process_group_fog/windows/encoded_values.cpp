#include "windows/encoded_values.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "core/linear_combination.hpp"

namespace fog {
namespace {

constexpr size_t kTileBytes = size_t(8) << 10;

} // namespace

EncodedValues::EncodedValues(CodecPtr codec, c10::ScalarType dtype, size_t numel, const void* message, size_t bytes)
    : codec_(std::move(codec)),
      dtype_(dtype),
      numel_(numel),
      message_(static_cast<const uint8_t*>(message)),
      unit_(codec_->unit(dtype)) {
  codec_->check("window", dtype);
  const size_t expected = codec_->bytes(dtype, numel);
  TORCH_CHECK_VALUE(bytes == expected, "got ", bytes, " bytes of ", codec_->text(), "; the window's tensor takes ", expected);
  places_ = codec_->open(dtype, numel, message_);
}

void EncodedValues::write(void* out, double weight, const void* base) const {
  const size_t item = c10::elementSize(dtype_);
  const bool whole = unit_.elements == 0;
  const size_t elements = kTileBytes / item;
  const size_t most = whole ? elements : std::max<size_t>(elements / unit_.elements, 1) * unit_.elements;
  const bool direct = weight == 1 && base == nullptr;
  std::vector<char> tile(direct ? 0 : std::min(most, numel_) * item);
  for (size_t first = 0; first < numel_; first += most) {
    const size_t count = std::min(most, numel_ - first);
    const uint8_t* data = whole ? message_ : message_ + first / unit_.elements * unit_.bytes;
    char* to = static_cast<char*>(out) + first * item;
    codec_->decode(dtype_, numel_, places_, data, first, count, direct ? to : tile.data());
    if (direct) {
      continue;
    }
    if (base == nullptr) {
      linear_combination(dtype_, to, tile.data(), weight, count);
    } else {
      linear_combination(dtype_, to, {static_cast<const char*>(base) + first * item, tile.data()}, {1.0, weight}, count);
    }
  }
}

} // namespace fog
