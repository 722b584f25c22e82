#include "windows/slot_values.hpp"

#include "core/linear_combination.hpp"

namespace fog {

void SlotValues::scale(void* out, const void* data, double weight, bool others_read) const {
  if (weight == 0) {
    linear_combination(dtype, out, {}, {}, numel);
  } else {
    linear_combination(dtype, out, data, weight, numel, others_read);
  }
}

void SlotValues::write(
    const WindowView& view, size_t index, WindowOp op, double weight, std::optional<double> p, const void* data) const {
  auto& place = view.slot(index);
  if (op == WindowOp::kPut) {
    const bool read = place.slot.may_have_been_read();
    const unsigned buffer = place.slot.writers_buffer();
    scale(view.buffer(place, buffer), data, weight, read);
    place.slot.put(buffer, p);
    return;
  }
  // Repeats if the owner has taken the base: then the slot is empty, and only this writer can fill it.
  while (true) {
    const auto base = place.slot.base();
    const unsigned buffer = place.slot.writers_buffer();
    auto* out = view.buffer(place, buffer);
    const void* sum = base.empty ? nullptr : view.buffer(place, base.buffer);
    if (base.empty) {
      scale(out, data, weight, true); // the owner has taken the previous value
    } else if (weight == 0) {
      scale(out, sum, 1.0);
    } else {
      linear_combination(dtype, out, {sum, data}, {1.0, weight}, numel);
    }
    if (place.slot.add(buffer, base.p + p.value_or(0.0), base)) {
      return;
    }
  }
}

} // namespace fog
