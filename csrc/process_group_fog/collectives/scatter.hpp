#pragma once

#include <vector>

#include "collectives/host_tree.hpp"
#include "collectives/part.hpp"
#include "engine/operation.hpp"

namespace fog {

// Rank i gets the root's i-th input; `inputs` is empty elsewhere.
//
// Small ones go down a tree, each rank's together with those of all below it; larger ones straight to where they belong.
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
  char* blocks_ = nullptr; // for this rank and all below it, in the tree's order; null where they go straight
  bool announced_ = false; // to the parent, that all below have come
  bool passed_on_ = false;
  bool copied_ = false;
};

} // namespace fog
