// Operations that move tensors between ranks without arithmetic: each message goes straight to where it belongs.
#pragma once

#include "engine/operation.hpp"

namespace fog {

// A part of a tensor on its way to or from one rank.
struct Part {
  void* data = nullptr;
  size_t bytes = 0;
};

// Every rank gets every rank's input: outputs[i] is rank i's.
class Allgather : public Operation {
 public:
  Allgather(Signature signature, Part input, std::vector<Part> outputs);

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  const Part input_;
  const std::vector<Part> outputs_;
  bool copied_ = false;
};

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
