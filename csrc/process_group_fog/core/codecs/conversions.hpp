// Conversions between the dtypes that codecs accept and float32, in which most codecs compute.
#pragma once

#include <cstddef>

#include <c10/core/ScalarType.h>

namespace fog::codecs {

// Converts `numel` elements to float32. A float64 is rounded to nearest; one beyond float32's range becomes infinity.
void widen(c10::ScalarType dtype, const void* from, size_t numel, float* to);

// Converts `numel` elements from float32, rounded to nearest, ties to even.
void narrow(c10::ScalarType dtype, const float* from, size_t numel, void* to);

} // namespace fog::codecs
