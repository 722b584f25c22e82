// The arithmetic of fog's operations, on plain memory: elementwise reductions and weighted sums of several inputs.
//
// Inputs are combined in the given order, so equal inputs give bit-equal results on every rank and in every run. The
// code is compiled without contraction of a*b+c, so the results are also the same on every CPU. No function allocates
// memory, so calls for small blocks are cheap.
#pragma once

#include <cstddef>

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fog {

// Throws ValueError with the allowed dtypes unless `op` is defined for `dtype`: SUM for every number and bool (logical
// or); AVG for all except bool; PREMUL_SUM for floating and complex; PRODUCT (of bool logical and), MIN and MAX for all
// except complex; BAND, BOR and BXOR for integers and bool.
void check_reduction(c10d::ReduceOp::RedOpType op, c10::ScalarType dtype);

// Computes out[i] = inputs[0][i] op inputs[1][i] op ... for `numel` elements of `dtype`. `scales` holds one factor per
// input for PREMUL_SUM; other operations ignore it. AVG is the SUM divided by `divisor`, or by the number of inputs if
// `divisor` is 0. Sums of integers wrap around, and their quotients are truncated, as in NCCL. float16 and bfloat16 are
// summed in float32 and rounded once. MIN and MAX give NaN if any input is NaN. `out` may be one of the inputs.
void reduce(
    c10d::ReduceOp::RedOpType op,
    c10::ScalarType dtype,
    void* out,
    c10::ArrayRef<const void*> inputs,
    c10::ArrayRef<double> scales,
    size_t numel,
    size_t divisor = 0);

// Throws ValueError unless neighbor averages are defined for `dtype`. The allowed dtypes are floating and complex.
void check_weighted_sum(c10::ScalarType dtype);

// Computes out[i] = weights[0]*inputs[0][i] + weights[1]*inputs[1][i] + ...; with `mean`, the sum of the inputs divided
// by their number. float32 is summed in float64 and rounded once, so that weights such as 1/3 cost no precision.
// float16 and bfloat16 are summed in float32. `out` may be one of the inputs.
void weighted_sum(
    c10::ScalarType dtype, void* out, c10::ArrayRef<const void*> inputs, c10::ArrayRef<double> weights, bool mean, size_t numel);

// --- weighted sums for windows; unlike weighted_sum(), they are defined for integers too ---

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
