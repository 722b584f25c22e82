#pragma once

#include <vector>

#include "collectives/host_tree.hpp"
#include "collectives/part.hpp"
#include "engine/operation.hpp"

namespace fog {

// The root gets every rank's input: outputs[i] is rank i's; `outputs` is empty elsewhere.
//
// Small ones come up a tree, each rank's together with all below it; larger ones straight to where they belong.
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
  HostTree tree_; // without children where they come straight
  char* blocks_ = nullptr; // of this rank and all below it, in the tree's order; null where they come straight
  bool announced_ = false; // to those below, that the root has come
  bool sent_ = false;
  bool copied_ = false;
};

} // namespace fog
