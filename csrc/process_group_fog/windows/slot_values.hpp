// Writing values into slots: the writer's part of the slot protocol, for local and remote writers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include <c10/core/ScalarType.h>

#include "transport/message.hpp"
#include "windows/window_memory.hpp"

namespace fog {

// The type and size of the values of a window: its tensor and all its slots.
struct SlotValues {
  c10::ScalarType dtype;
  size_t numel;
  size_t bytes;

  // Sets `out` to weight * data; to zeros if the weight is 0, whatever the data. `others_read`: see
  // linear_combination().
  void scale(void* out, const void* data, double weight, bool others_read = false) const;
  // Puts or accumulates weight * data, and p if given, as the slot's only writer: writes to an unused buffer, then
  // publishes it by a compare-and-swap. The origin calls this if it has mapped the slot; otherwise the target's engine
  // calls it for the origin.
  void write(const WindowView& view, size_t slot, WindowOp op, double weight, std::optional<double> p, const void* data) const;

 private:
  // Sets `out` to weight * data, or with a `base` to base + weight * data. A weight of 0 stands for zeros.
  void add(void* out, const void* base, const void* data, double weight, bool others_read) const;
};

} // namespace fog
