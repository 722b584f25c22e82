// Reductions that the library between hosts, MPI, computes itself.
#pragma once

#include <cstddef>
#include <memory>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "core/signature.hpp"
#include "transport/transport.hpp"

namespace fog {

// The reductions of one group. Every call except has() needs the engine's lock.
class NetworkSums {
 public:
  struct Terms {
    OpKind kind; // kAllreduce, kReduce or kReduceScatter
    c10d::ReduceOp::RedOpType op; // AVG is computed as a sum; the caller divides
    c10::ScalarType dtype;
    const void* in; // for kReduceScatter, one part of equal size for each rank
    void* out; // equal to `in` for a sum in place; null if a reduce has no result here
    size_t numel; // elements of the result
    int root = -1; // of kReduce
  };

  // Belongs to its owner until it is done. It cannot be done on any rank before all ranks have begun it.
  class Sum : public Outgoing {
   public:
    // All ranks have called it with the same arguments. It begins when all sums that were added before it have begun:
    // ranks must begin sums in one order, but may learn of the agreement in different orders.
    virtual void agreed() = 0;
  };

  virtual ~NetworkSums() = default;
  // Returns whether this sum, with a result of `numel` elements, is supported. The same on all ranks.
  virtual bool has(OpKind kind, c10d::ReduceOp::RedOpType op, c10::ScalarType dtype, size_t numel) const = 0;
  // Adds a sum, in program order, which must be the same on all ranks. Failures are in the sum's `error`.
  virtual std::shared_ptr<Sum> add(const Terms& terms, const std::shared_ptr<TransferOwner>& owner) = 0;
  // Ends the use of the group. `failed`: it is also unknown how far its ranks have come.
  virtual void close(bool failed) = 0;
};

} // namespace fog
