#pragma once

#include "collectives/reduction.hpp"

namespace fog {

// The root gets the reduction over all ranks, in place; the others' tensors stay as they are. Arithmetic as in Allreduce.
//
// Small tensors go straight to the root. Larger ones are reduced by slices on all ranks, and the slices go to the root.
class Reduce : public Reduction {
 public:
  Reduce(Signature signature, void* data, size_t numel, double scale);

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  bool at_root() const {
    return rank() == signature_.root;
  }
  char* slice(int rank) const;

  char* const data_;
  const size_t numel_;
  bool whole_ = false;
  bool reduced_ = false;
  size_t part_ = 0; // bytes that this rank reduces
  char* result_ = nullptr;
};

} // namespace fog
