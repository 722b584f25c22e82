#pragma once

#include "engine/operation.hpp"

namespace fog {

// Every rank gets the root's tensor.
//
// Small tensors go down a binomial tree. On one host every rank reads a larger one from the root's memory. Between hosts it
// is cut into one slice for each rank but the root; each rank passes its slice on to the others, so the root sends the
// tensor only once (scatter, then allgather; M. Barnett et al., "Building a high-performance collective communication
// library", SC 1994, doi:10.1109/SUPERC.1994.344261).
class Broadcast : public Operation {
 public:
  Broadcast(Signature signature, void* data, size_t bytes);

 protected:
  void launch() override;
  Action advance() override;

 private:
  enum class Shape { kTree, kSlices, kStar };
  void send_down();
  void launch_slices();
  int relative(int distance) const;

  char* const data_;
  const size_t bytes_;
  Shape shape_ = Shape::kTree;
  bool passed_on_ = false;
};

} // namespace fog
