// What the operations that reduce over ranks have in common: one input from each rank, combined in the order of the ranks.
#pragma once

#include <vector>

#include "engine/operation.hpp"

namespace fog {

class Reduction : public Operation {
 protected:
  // `scale` is this rank's factor for PREMUL_SUM. `members` are the ranks that take part, this one among them, in the order
  // in which their inputs are combined; none stands for all ranks of the group.
  Reduction(Signature signature, double scale, std::vector<int> members = {});

  // How many ranks take part, which one has a place among them, and the place of this one.
  int count() const;
  int member(int place) const;
  int place() const;

  void use_own_input(const void* data);
  // The input of the rank with this place comes as its message 0.
  void expect_input(int place, size_t bytes);
  // For compute(): what use_inputs() has found. `out` may be this rank's own input.
  void reduce_into(void* out);

  size_t item() const {
    return item_;
  }
  double scale() const {
    return scale_;
  }

 private:
  struct Expected {
    int place;
    size_t receive;
  };
  const size_t item_; // bytes of an element
  const double scale_;
  const std::vector<int> members_;
  std::vector<Input> inputs_; // by place
  std::vector<double> scales_; // by place
  std::vector<Expected> expected_;
};

} // namespace fog
