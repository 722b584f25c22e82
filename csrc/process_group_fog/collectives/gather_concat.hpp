#pragma once

#include <ATen/core/Tensor.h>

#include "core/neighbor_plan.hpp"
#include "engine/operation.hpp"

namespace fog {

// Concatenates tensors of some ranks along dimension 0; their first dimensions may differ. The sizes come with the
// messages; then the result is allocated, and the data is received directly into it. Serves neighbor_allgather (sources
// and destinations of a plan) and the allgather of unequal tensors (all ranks, including this one).
class GatherConcat : public Operation {
 public:
  // `sources` are in the order of the result, `destinations` in any order; both may contain this rank. `tensor` is
  // contiguous and has at least one dimension. The Work's result is the concatenated tensor.
  GatherConcat(Signature signature, at::Tensor tensor, std::vector<int> sources, std::vector<int> destinations);

  // What the sources have called, once the operation is done.
  const std::vector<Signature>& signatures() const {
    return signatures_;
  }

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  enum class Phase { kHeaders, kAllocated, kData };

  const at::Tensor tensor_;
  const std::vector<int> sources_;
  const std::vector<int> destinations_;
  Phase phase_ = Phase::kHeaders;
  at::Tensor result_;
  std::vector<Signature> signatures_; // by source
  std::vector<char*> places_; // by source
};

} // namespace fog
