// Operations in which every rank has other data for, or from, each rank: each message goes straight to where it belongs.
#pragma once

#include <vector>

#include "collectives/part.hpp"
#include "engine/operation.hpp"

namespace fog {

// The root gets every rank's input; `outputs` is empty elsewhere.
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
  bool copied_ = false;
};

// Rank i gets the root's i-th input; `inputs` is empty elsewhere.
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
  bool copied_ = false;
};

// Rank j gets rank i's j-th input as its i-th output.
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
