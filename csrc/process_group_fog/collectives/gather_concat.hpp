#pragma once

#include <ATen/core/Tensor.h>

#include "engine/operation.hpp"

namespace fog {

// Tensors of some ranks, one after the other along dimension 0, whose first dimensions may differ: the sizes come with the
// messages, then the result is allocated and the data received straight into it. Serves neighbor_allgather (sources and
// destinations of a plan) and the allgather of unequal tensors (all ranks, this one included).
class GatherConcat : public Operation {
 public:
  // `sources` in the order of the result, `destinations` in any order; both may hold this rank. `tensor` is contiguous and
  // has one dimension or more. The Work's result is the one concatenated tensor.
  GatherConcat(Signature signature, at::Tensor tensor, std::vector<int> sources, std::vector<int> destinations);

  // What the sources called, once it is done.
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
