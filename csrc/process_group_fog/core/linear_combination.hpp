// Weighted sums for windows. Unlike weighted_sum(), they are defined for integers too.
#pragma once

#include <cstddef>

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

namespace fog {

// Throws ValueError unless windows are defined for `dtype`. The allowed dtypes are integers, floating and complex.
void check_linear_combination(const char* op, c10::ScalarType dtype);

// Computes out[i] = weights[0]*inputs[0][i] + weights[1]*inputs[1][i] + ..., or zeros if there are no inputs. Floating
// and complex dtypes are computed as in weighted_sum(). Integers are exact if all weights are whole numbers, and wrap
// around on overflow. With other weights they are summed in float64 and rounded to nearest, ties to even; a result out
// of range becomes the largest or smallest number, and NaN becomes 0. `out` may be one of the inputs. `others_read`
// says that another core has read the memory of `out` and will read the result; it affects the speed only.
void linear_combination(
    c10::ScalarType dtype,
    void* out,
    c10::ArrayRef<const void*> inputs,
    c10::ArrayRef<double> weights,
    size_t numel,
    bool others_read = false);

} // namespace fog
