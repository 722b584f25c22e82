// Names for people: dtypes and reductions as Python spells them.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fog {

// "float32"; c10 itself has only "Float" to offer.
const char* dtype_name(c10::ScalarType dtype);

// "SUM"; nullptr for what is no reduction.
const char* reduction_name(c10d::ReduceOp::RedOpType op);

} // namespace fog
