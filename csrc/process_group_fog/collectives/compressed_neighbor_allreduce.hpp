#pragma once

#include "collectives/compressed_sum.hpp"
#include "core/neighbor_plan.hpp"
#include "engine/operation.hpp"

namespace fog {

// NeighborAllreduce whose messages are encoded: out = neighbor_sum() of the decoded tensors of the sources and this
// rank's own tensor, or as Encoding says. `out` may be `in`. The rank encodes once, for all its destinations.
class CompressedNeighborAllreduce : public Operation {
 public:
  CompressedNeighborAllreduce(Signature signature, NeighborPlan plan, Encoding encoding, const void* in, void* out, size_t numel);

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  enum class Phase { kEncode, kSend, kSum };

  const NeighborPlan plan_;
  CompressedSum sum_;
  const void* const in_;
  void* const out_;
  void* message_ = nullptr; // null if nothing needs it
  Phase phase_ = Phase::kEncode;
};

} // namespace fog
