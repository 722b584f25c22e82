// Names of dtypes and reductions, as Python spells them, for messages.
#pragma once

#include <iterator>
#include <string>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fog {

// Returns "float32" and the like; c10::toString() says "Float".
inline std::string dtype_name(c10::ScalarType dtype) {
  if (dtype < c10::ScalarType::Byte || dtype >= c10::ScalarType::Undefined) { // in a damaged message
    return "unknown dtype";
  }
  return std::string(c10::getDtypeNames(dtype).first);
}

// Returns "SUM" and the like, or nullptr if `op` is not a reduction.
inline const char* reduction_name(c10d::ReduceOp::RedOpType op) {
  static constexpr const char* names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return op < std::size(names) ? names[op] : nullptr;
}

} // namespace fog
