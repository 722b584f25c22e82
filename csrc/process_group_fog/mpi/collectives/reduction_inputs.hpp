// The inputs of one reduction, one from each rank, in rank order.
#pragma once

#include <vector>

#include "../../arithmetic.hpp"
#include "../../signature.hpp"

namespace fog::mpi {

struct ReductionInputs {
  std::vector<const void*> data; // by rank
  std::vector<size_t> receives; // by rank: number of the receive that brings it; unused for this rank
  std::vector<double> scales; // by rank

  explicit ReductionInputs(int size = 0) : data(size, nullptr), receives(size, 0), scales(size, 1.0) {}

  void reduce_into(const Signature& signature, void* out, size_t numel) const {
    reduce(
        static_cast<c10d::ReduceOp::RedOpType>(signature.reduce_op), static_cast<c10::ScalarType>(signature.dtype), out, data,
        scales, numel);
  }
};

} // namespace fog::mpi
