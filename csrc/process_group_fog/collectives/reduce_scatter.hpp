#pragma once

#include "collectives/reduction.hpp"

namespace fog {

// Rank i gets the reduction over all ranks of their i-th inputs. The arithmetic is as in Allreduce.
//
// If there are few ranks, they send each input directly to its rank. Otherwise the sums go by hosts, and inputs that
// take the same path must be contiguous in memory.
class ReduceScatter : public Reduction {
 public:
  // The order of ranks in which the inputs must lie in memory, one after the other; empty if the order does not matter.
  static std::vector<int> order(const Layout& layout, size_t bytes);

  // inputs[i] has numels[i] elements and goes to rank i; `out` has numels[rank] elements and may be inputs[rank].
  ReduceScatter(const Terms& terms, std::vector<const void*> inputs, const std::vector<size_t>& numels, void* out);
  // The same for inputs that lie in order() at `data`. They are overwritten; the result replaces this rank's own input.
  // `bytes` is what order() was given.
  ReduceScatter(const Terms& terms, void* data, const std::vector<int>& order, const std::vector<size_t>& numels, size_t bytes);

 protected:
  const char* given(size_t begin) const override;
  char* place(size_t begin) const override;

 private:
  const std::vector<const void*> inputs_; // empty if the inputs are in `data_`
  const Cut slices_;
  char* const data_; // from the element `first_` on
  const size_t first_ = 0;
};

} // namespace fog
