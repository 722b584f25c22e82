#include "windows/slot_values.hpp"

#include "core/arithmetic.hpp"

namespace fog {

void SlotValues::scale(void* out, const void* data, double weight, bool others_read) const {
  if (weight == 0) {
    linear_combination(dtype, out, {}, {}, numel);
  } else {
    linear_combination(dtype, out, data, weight, numel, others_read);
  }
}

void SlotValues::add(void* out, const void* base, const void* data, double weight, bool others_read) const {
  if (weight == 0) {
    scale(out, base, base == nullptr ? 0.0 : 1.0, others_read);
  } else if (base == nullptr) {
    scale(out, data, weight, others_read);
  } else {
    linear_combination(dtype, out, {base, data}, {1.0, weight}, numel);
  }
}

void SlotValues::write(
    const WindowView& view, size_t index, WindowOp op, double weight, std::optional<double> p, const void* data) const {
  auto& place = view.slot(index);
  if (op == WindowOp::kPut) {
    const bool read = place.slot.may_have_been_read();
    const unsigned buffer = place.slot.writers_buffer();
    add(view.buffer(place, buffer), nullptr, data, weight, read);
    place.slot.put(buffer, p);
    return;
  }
  // Repeats if the owner has taken the base: then the slot is empty, and only this writer can fill it.
  while (true) {
    const auto base = place.slot.base();
    const unsigned buffer = place.slot.writers_buffer();
    // if the slot is empty, the owner has taken the previous value
    add(view.buffer(place, buffer), base.empty ? nullptr : view.buffer(place, base.buffer), data, weight, base.empty);
    if (place.slot.add(buffer, base.p + p.value_or(0.0), base)) {
      return;
    }
  }
}

} // namespace fog
