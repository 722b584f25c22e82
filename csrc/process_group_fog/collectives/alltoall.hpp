#pragma once

#include <vector>

#include "collectives/part.hpp"
#include "engine/operation.hpp"

namespace fog {

// Rank j gets rank i's j-th input as its i-th output. Each input goes directly to its receiver as one message.
class Alltoall : public Operation {
 public:
  Alltoall(Signature signature, std::vector<Part> inputs, std::vector<Part> outputs);

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  const std::vector<Part> inputs_;
  const std::vector<Part> outputs_;
  bool copied_ = false;
};

} // namespace fog
