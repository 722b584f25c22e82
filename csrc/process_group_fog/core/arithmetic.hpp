// The arithmetic of fog's operations, over plain memory: elementwise reductions and weighted sums of several inputs.
//
// Inputs are combined in the order given, so equal inputs give bit-equal results on every rank and in every run; the code
// is compiled without contraction of a*b+c, so also on every CPU. Nothing is allocated: calls for small blocks are cheap.
#pragma once

#include <cstddef>

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fog {

// Throws ValueError, naming what is allowed, unless `op` is defined for `dtype`: SUM, PRODUCT for every number and bool
// (where they are logical or, and); AVG for all but bool; PREMUL_SUM for floating and complex; MIN, MAX for all but complex;
// BAND, BOR, BXOR for integers and bool.
void check_reduction(c10d::ReduceOp::RedOpType op, c10::ScalarType dtype);

// out[i] = inputs[0][i] op inputs[1][i] op ... for `numel` elements of `dtype`. `scales` holds one factor an input for
// PREMUL_SUM and is ignored otherwise. AVG is the SUM divided by `divisor`, or by the number of inputs if that is 0; sums of integers wrap
// around, and of their quotients the fraction is cut off, as NCCL has it. float16 and bfloat16 are summed in float32 and rounded once. MIN and MAX give
// NaN where any input is NaN. `out` may be one of the inputs.
void reduce(
    c10d::ReduceOp::RedOpType op,
    c10::ScalarType dtype,
    void* out,
    c10::ArrayRef<const void*> inputs,
    c10::ArrayRef<double> scales,
    size_t numel,
    size_t divisor = 0);

// Throws ValueError unless neighbor averages are defined for `dtype`: floating and complex.
void check_weighted_sum(c10::ScalarType dtype);

// out[i] = weights[0]*inputs[0][i] + weights[1]*inputs[1][i] + ...; with `mean`, the sum of the inputs divided by their
// number. float32 is summed in float64 and rounded once, so that weights such as 1/3 lose nothing on the way;
// float16 and bfloat16 are summed in float32. `out` may be one of the inputs.
void weighted_sum(
    c10::ScalarType dtype, void* out, c10::ArrayRef<const void*> inputs, c10::ArrayRef<double> weights, bool mean, size_t numel);

} // namespace fog
