// Weighted sums on a device, in either of two forms with the same bits: those of weighted_sum() on the CPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace fog::cuda {

enum class CombineForm {
  kKernel, // fog's own kernel: one pass over everything
  kTorch, // operations of torch, which any device has: a pass over the result for each row, in the accumulation type
};

// The form that serves a device: the kernel where it can be had, else, after one warning that says why not, torch's operations.
// FOG_COMBINE=torch or =kernel chooses; ValueError for anything else, RuntimeError where =kernel cannot be had. Compiles the kernel when
// first asked, which takes a moment and must not happen while a stream is captured.
CombineForm combine_form(const at::Device& device);

// out = weights[0] * rows[0] + weights[1] * rows[1] + ...; with `mean`, the sum of the rows over their number (`weights` is not used).
// Zeros if there is no row. Summed in the order given, float32 in float64, float16 and bfloat16 in float32, and rounded once; complex
// numbers part by part. On the device's current stream, without waiting for it.
//
// All tensors are contiguous, of one device, dtype (floating or complex) and number of elements. `out` may be one of the rows.
void combine(CombineForm form, const at::Tensor& out, c10::ArrayRef<at::Tensor> rows, c10::ArrayRef<double> weights, bool mean);

} // namespace fog::cuda
