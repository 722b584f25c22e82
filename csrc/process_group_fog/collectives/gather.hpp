#pragma once

#include <vector>

#include "collectives/host_tree.hpp"
#include "collectives/part.hpp"
#include "engine/operation.hpp"

namespace fog {

// The root gets every rank's input: outputs[i] is rank i's; `outputs` is empty on the other ranks.
//
// Small inputs go up a tree, each rank's together with the inputs of all ranks below it. Larger inputs go directly to
// the root.
class Gather : public Operation {
 public:
  Gather(Signature signature, Part input, std::vector<Part> outputs);

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  const Part input_;
  const std::vector<Part> outputs_;
  HostTree tree_; // without children if inputs go directly
  char* blocks_ = nullptr; // of this rank and all ranks below it, in the tree's order; null if inputs go directly
  bool announced_ = false; // to the ranks below, that the root has come
  bool sent_ = false;
  bool copied_ = false;
};

} // namespace fog
