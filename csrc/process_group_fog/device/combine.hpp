// Weighted sums on a device, by operations of ATen.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace fog::device {

// Computes out = own_weight * own + weights[0] * rows[0] + weights[1] * rows[1] + ...; with `mean`, for which all
// weights must be 1, divided by the number of terms. The own term is skipped if its weight is 0; rows must have other
// weights. Weights are rounded to the type of the sum: float32 for float32, float16 and bfloat16, and float64 for
// float64. Complex numbers are summed part by part. Runs on the device's current stream without waiting for it and
// without a copy from the host, so it may be captured into a graph.
//
// All tensors have the same device and dtype, floating or complex. `out` and `own` are contiguous vectors; `out` may be
// `own`. `rows` is a matrix with a row per weight and a column per element of `own`; the elements of a row are
// contiguous.
void combine(
    const at::Tensor& out,
    const at::Tensor& own,
    double own_weight,
    const at::Tensor& rows,
    c10::ArrayRef<double> weights,
    bool mean = false);

// Returns weight * vector, rounded once; zeros if the weight is 0, whatever the vector contains.
at::Tensor scaled(const at::Tensor& vector, double weight);

} // namespace fog::device
