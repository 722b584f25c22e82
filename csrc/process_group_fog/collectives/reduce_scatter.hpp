#pragma once

#include "collectives/reduction.hpp"

namespace fog {

// Rank i gets the reduction over all ranks of their i-th inputs. Each rank sends every input straight to its rank.
class ReduceScatter : public Reduction {
 public:
  // inputs[i] has bytes[i] bytes and goes to rank i; `out` has bytes[rank] bytes and may be inputs[rank].
  ReduceScatter(Signature signature, std::vector<const void*> inputs, std::vector<size_t> bytes, void* out, double scale);

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  const std::vector<const void*> sends_from_;
  const std::vector<size_t> bytes_;
  void* const out_;
};

} // namespace fog
