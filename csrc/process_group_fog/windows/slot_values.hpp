// Writing values into slots: the writer's part of the slot protocol, for local and remote writers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <c10/core/ScalarType.h>

#include "core/codecs/codecs.hpp"
#include "transport/message.hpp"
#include "windows/window_memory.hpp"

namespace fog {

// The values of a put or an accumulate as a codec's message.
//
// Decodes the message tile by tile, in the first-level cache, straight to where the values belong. The result has the bits
// of linear_combination() with the decoded values.
class EncodedValues {
 public:
  // `message` has `bytes` and must stay. Throws ValueError unless it is a message of the codec for `numel` elements.
  EncodedValues(CodecPtr codec, c10::ScalarType dtype, size_t numel, const void* message, size_t bytes);

  // Sets `out` to weight * decoded, or to base + weight * decoded. `out` may be `base`.
  void write(void* out, double weight, const void* base = nullptr) const;

 private:
  const CodecPtr codec_;
  const c10::ScalarType dtype_;
  const size_t numel_;
  const uint8_t* const message_;
  const Codec::Unit unit_;
  Codec::Places places_;
};

// The values of a put or an accumulate: the values themselves or, if `encoded` is set, a message.
struct GivenValues {
  const void* data = nullptr;
  const EncodedValues* encoded = nullptr;
};

// The type and size of the values of a window: its tensor and all its slots.
struct SlotValues {
  c10::ScalarType dtype;
  size_t numel;
  size_t bytes;

  // Sets `out` to weight * data; to zeros if the weight is 0, whatever the data. `others_read`: see
  // linear_combination().
  void scale(void* out, const void* data, double weight, bool others_read = false) const;
  // Puts or accumulates weight * given, and p if given, as the slot's only writer: writes to an unused buffer, then
  // publishes it by a compare-and-swap. The origin calls this if it has mapped the slot; otherwise the target's engine
  // calls it for the origin.
  void write(const WindowView& view, size_t slot, WindowOp op, double weight, std::optional<double> p, const GivenValues& given) const;

 private:
  // Sets `out` to weight * given, or with a `base` to base + weight * given. A weight of 0 stands for zeros.
  void add(void* out, const void* base, const GivenValues& given, double weight, bool others_read) const;
};

} // namespace fog
