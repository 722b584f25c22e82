#pragma once

#include "collectives/reduction.hpp"

namespace fog {

// Every rank gets the reduction over all ranks, or over all members of a part of the group, in place.
//
// Small tensors go whole from each rank to each other one, a single hop. Larger ones are cut into one slice a rank: each
// rank gets its slice from all others, reduces it, and sends the result to all (reduce-scatter, then allgather, each in one
// hop; R. Thakur, R. Rabenseifner and W. Gropp, doi:10.1177/1094342005051521, section 4.4 discusses the family). Either
// way each element is reduced in the order of the ranks, in the accumulation type, and rounded once: results are bit-equal on
// all ranks and do not depend on the size of the tensor.
class Allreduce : public Reduction {
 public:
  // `scale` and `members` as in Reduction.
  Allreduce(Signature signature, void* data, size_t numel, double scale, std::vector<int> members = {});

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  // What the rank with this place reduces, and its bytes.
  char* slice(int place) const;
  size_t part(int place) const;
  std::vector<Destination> other_members(double scale = 1.0) const;

  char* const data_;
  const size_t numel_;
  int own_ = 0; // place of this rank
  bool whole_ = false; // not cut into slices
  bool reduced_ = false;
};

} // namespace fog
