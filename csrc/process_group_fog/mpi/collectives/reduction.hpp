// What the operations that reduce over all ranks have in common: one input from each rank, combined in rank order.
#pragma once

#include <vector>

#include "../operation.hpp"

namespace fog::mpi {

class Reduction : public Operation {
 protected:
  // `scale` is this rank's factor for PREMUL_SUM.
  Reduction(Signature signature, double scale);

  void use_own_input(const void* data);
  // The input of `peer` comes as its message 0.
  void expect_input(int peer, size_t bytes);
  // For compute(): what use_operands() has found. `out` may be this rank's own input.
  void reduce_into(void* out);

  size_t item() const {
    return item_;
  }
  double scale() const {
    return scale_;
  }

 private:
  struct Input {
    int peer;
    size_t receive;
  };
  const size_t item_; // bytes of an element
  const double scale_;
  std::vector<Operand> operands_; // by rank
  std::vector<double> scales_; // by rank
  std::vector<Input> expected_;
};

} // namespace fog::mpi
