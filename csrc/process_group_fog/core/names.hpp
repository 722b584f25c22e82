// Names of dtypes and reductions, as Python spells them, for messages.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fog {

// Returns "float32" and the like; c10 itself only offers "Float".
const char* dtype_name(c10::ScalarType dtype);

// Returns "SUM" and the like, or nullptr if `op` is not a reduction.
const char* reduction_name(c10d::ReduceOp::RedOpType op);

} // namespace fog
