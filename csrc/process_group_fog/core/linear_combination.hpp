// Weighted sums for windows: of every number, integers included.
#pragma once

#include <cstddef>

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

namespace fog {

// Throws ValueError unless windows are defined for `dtype`: integers, floating and complex.
void check_linear_combination(const char* op, c10::ScalarType dtype);

// out[i] = weights[0]*inputs[0][i] + weights[1]*inputs[1][i] + ..., zeros if there is no input. Floating and complex as in
// weighted_sum(). Integers: where all weights are whole numbers, exact but for overflow, which wraps around; else summed in
// float64 and rounded to nearest (halves to even), the largest or smallest number where that is out of range, and 0 for NaN.
// `out` may be one of the inputs. `others_read`: another core has read what is there, and will read the result; a matter of time only.
void linear_combination(
    c10::ScalarType dtype,
    void* out,
    c10::ArrayRef<const void*> inputs,
    c10::ArrayRef<double> weights,
    size_t numel,
    bool others_read = false);

} // namespace fog
