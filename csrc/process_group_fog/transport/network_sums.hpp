// Reductions that the library between hosts does itself: MPI's.
#pragma once

#include <cstddef>
#include <memory>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "core/signature.hpp"
#include "transport/transport.hpp"

namespace fog {

// Those among the ranks of one group. Every call needs the engine's lock, but has().
class NetworkSums {
 public:
  struct Terms {
    OpKind kind; // kAllreduce, kReduce or kReduceScatter
    c10d::ReduceOp::RedOpType op; // AVG is summed only: the caller divides
    c10::ScalarType dtype;
    const void* in; // of kReduceScatter one part for each rank, all of one size
    void* out; // the same as `in` for a sum in place, and null where a reduce has no result
    size_t numel; // of the result
    int root = -1; // of kReduce
  };

  // Its owner's until it is done: no rank's is before all have begun.
  class Sum : public Outgoing {
   public:
    // All ranks have come to it and ask for the same. It begins when all that were added before have begun: ranks must begin sums in one
    // order, and may learn in another that they agree.
    virtual void agreed() = 0;
  };

  virtual ~NetworkSums() = default;
  // Whether it has such a sum, with results of so many elements; the same on all ranks.
  virtual bool has(OpKind kind, c10d::ReduceOp::RedOpType op, c10::ScalarType dtype, size_t numel) const = 0;
  // In the order of the program, which all ranks have alike. What goes wrong is the sum's `error`.
  virtual std::shared_ptr<Sum> add(const Terms& terms, const std::shared_ptr<TransferOwner>& owner) = 0;
  // The group is not used any more; `failed`: nor does anybody know how far its ranks have come.
  virtual void close(bool failed) = 0;
};

} // namespace fog
