#pragma once

#include <vector>

#include "collectives/host_tree.hpp"
#include "collectives/part.hpp"
#include "engine/operation.hpp"

namespace fog {

// Rank i gets the root's i-th input; `inputs` is empty on the other ranks.
//
// Small inputs go down a tree, each rank's together with the inputs of all ranks below it. Larger inputs go directly to
// their ranks.
class Scatter : public Operation {
 public:
  Scatter(Signature signature, std::vector<Part> inputs, Part output);

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  const std::vector<Part> inputs_;
  const Part output_;
  HostTree tree_;
  char* blocks_ = nullptr; // for this rank and all ranks below it, in the tree's order; null if inputs go directly
  bool announced_ = false; // to the parent, that all ranks below have come
  bool passed_on_ = false;
  bool copied_ = false;
};

} // namespace fog
