// How values get into a slot: the writer's part of the slot protocol, wherever the writer stands.
#pragma once

#include <cstddef>
#include <optional>

#include <c10/core/ScalarType.h>

#include "transport/message.hpp"
#include "windows/window_memory.hpp"

namespace fog {

// The tensor and all slots of a window hold such values.
struct SlotValues {
  c10::ScalarType dtype;
  size_t numel;
  size_t bytes;

  // `out` becomes weight * data; zeros if the weight is 0, whatever the data. `others_read`: see linear_combination().
  void scale(void* out, const void* data, double weight, bool others_read = false) const;
  // Puts or accumulates weight * data, and p if it comes along, as the slot's only writer: it writes to a buffer that nobody looks at and
  // then publishes that by one compare-and-swap. The origin does it where it has mapped the slot, else the target's engine does it for the origin.
  void write(const WindowView& view, size_t slot, WindowOp op, double weight, std::optional<double> p, const void* data) const;
};

} // namespace fog
