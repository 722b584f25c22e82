// Weighted sums on a device, by operations of ATen.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace fog::device {

// out = own_weight * own + weights[0] * rows[0] + weights[1] * rows[1] + ...; with `mean`, where all weights are 1, that sum over the
// number of its terms. A term of weight 0 of its own tensor is left out; rows must have other weights. Weights are rounded to the type
// of the sum: float32 for float32, float16 and bfloat16, and float64 for float64. Complex numbers are summed part by part. On the
// device's current stream, without waiting for it and without a copy from the host, so that it may be captured into a graph.
//
// All tensors are of one device and dtype, floating or complex. `out` and `own` are vectors, of consecutive elements; `out` may be
// `own`. `rows` is a matrix of as many rows as there are weights, and with as many columns as `own` has elements, which follow one
// another.
void combine(
    const at::Tensor& out,
    const at::Tensor& own,
    double own_weight,
    const at::Tensor& rows,
    c10::ArrayRef<double> weights,
    bool mean = false);

// weight * vector, or zeros where the weight is 0, whatever is in the vector. Rounded once.
at::Tensor scaled(const at::Tensor& vector, double weight);

} // namespace fog::device
