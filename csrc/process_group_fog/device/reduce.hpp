// Elementwise reductions on a device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fog::device {

// Throws ValueError, as an error of `op`, for the reductions that fog::reduce() supports on the CPU but devices do not:
// MIN, MAX and AVG of uint16, uint32 and uint64.
void check_reduction_on_device(const char* op, c10d::ReduceOp::RedOpType reduction, const at::Tensor& tensor);

// Computes out = rows[0] op rows[1] op ..., in the types and the order of fog::reduce() on the CPU. PREMUL_SUM adds:
// the caller applies the factors. Runs on the device's current stream. All tensors are contiguous and have the same
// device, dtype and shape; `out` may be one of the rows.
void reduce(c10d::ReduceOp::RedOpType op, const at::Tensor& out, c10::ArrayRef<at::Tensor> rows);

} // namespace fog::device
