#pragma once

#include "collectives/reduction.hpp"

namespace fog {

// Rank i gets the reduction over all ranks of their i-th inputs. Arithmetic as in Allreduce.
//
// Few ranks send each input straight to its rank. Else sums go by hosts, and inputs have to lie so that those which take one way are neighbors.
class ReduceScatter : public Reduction {
 public:
  // In which order of their ranks inputs are to lie in memory, one after the other; empty if that does not matter.
  static std::vector<int> order(const Layout& layout, size_t bytes);

  // inputs[i] has numels[i] elements and goes to rank i; `out` has numels[rank] elements and may be inputs[rank].
  ReduceScatter(const Terms& terms, std::vector<const void*> inputs, const std::vector<size_t>& numels, void* out);
  // The same for inputs that lie in order() at `data`, and are used up: the result takes the place of this rank's own.
  ReduceScatter(const Terms& terms, void* data, const std::vector<int>& order, const std::vector<size_t>& numels);

 protected:
  const char* given(size_t begin) const override;
  char* place(size_t begin) const override;

 private:
  const std::vector<const void*> inputs_; // empty: they are in `data_`
  const Cut slices_;
  char* const data_;
};

} // namespace fog
