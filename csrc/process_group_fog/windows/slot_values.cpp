#include "windows/slot_values.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include "core/arithmetic.hpp"

namespace fog {

void SlotValues::scale(void* out, const void* data, double weight, bool others_read) const {
  if (weight == 0) {
    linear_combination(dtype, out, {}, {}, numel);
  } else {
    linear_combination(dtype, out, data, weight, numel, others_read);
  }
}

void SlotValues::add(void* out, const void* base, const GivenValues& given, double weight, bool others_read) const {
  if (weight == 0) {
    scale(out, base, base == nullptr ? 0.0 : 1.0, others_read);
  } else if (given.encoded != nullptr) {
    given.encoded->write(out, weight, base);
  } else if (base == nullptr) {
    scale(out, given.data, weight, others_read);
  } else {
    linear_combination(dtype, out, {base, given.data}, {1.0, weight}, numel);
  }
}

void SlotValues::write(
    const WindowView& view, size_t index, WindowOp op, double weight, std::optional<double> p, const GivenValues& given) const {
  auto& place = view.slot(index);
  if (op == WindowOp::kPut) {
    const bool read = place.slot.may_have_been_read();
    const unsigned buffer = place.slot.writers_buffer();
    add(view.buffer(place, buffer), nullptr, given, weight, read);
    place.slot.put(buffer, p);
    return;
  }
  // Repeats if the owner has taken the base: then the slot is empty, and only this writer can fill it.
  while (true) {
    const auto base = place.slot.base();
    const unsigned buffer = place.slot.writers_buffer();
    // if the slot is empty, the owner has taken the previous value
    add(view.buffer(place, buffer), base.empty ? nullptr : view.buffer(place, base.buffer), given, weight, base.empty);
    if (place.slot.add(buffer, base.p + p.value_or(0.0), base)) {
      return;
    }
  }
}

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
