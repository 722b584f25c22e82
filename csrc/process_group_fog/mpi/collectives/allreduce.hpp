#pragma once

#include "reduction.hpp"

namespace fog::mpi {

// Every rank gets the reduction over all ranks, in place.
//
// Small tensors go whole from each rank to each other one, a single hop. Larger ones are cut into one slice a rank: each
// rank gets its slice from all others, reduces it, and sends the result to all (reduce-scatter, then allgather, each in one
// hop; R. Thakur, R. Rabenseifner and W. Gropp, doi:10.1177/1094342005051521, section 4.4 discusses the family). Either
// way each element is reduced in rank order, in the accumulation type, and rounded once: results are bit-equal on all
// ranks and do not depend on the size of the tensor.
class Allreduce : public Reduction {
 public:
  // `scale` is this rank's factor for PREMUL_SUM.
  Allreduce(Signature signature, void* data, size_t numel, double scale);

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  char* slice(int rank) const;
  size_t part() const;

  char* const data_;
  const size_t numel_;
  bool whole_ = false; // not cut into slices
  bool reduced_ = false;
};

} // namespace fog::mpi
