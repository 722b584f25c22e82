#pragma once

#include <vector>

#include "collectives/part.hpp"
#include "engine/operation.hpp"

namespace fog {

// Every rank gets every rank's input: outputs[i] is rank i's.
//
// Large inputs go once to each other host, to the rank with the sender's place there, which passes them on to the other
// ranks of its host, and, the largest ones, to the next host: around a ring, for the reason that collectives/ring.hpp has.
// On one host, each rank sends its input directly to all others. For small inputs, a rank sends all
// inputs that it has, in ceil(log2(n)) steps, and puts them in order at the end (J. Bruck et al., "Efficient algorithms
// for all-to-all communications in multiport message-passing systems", IEEE TPDS 8(11), 1997, doi:10.1109/71.642949).
class Allgather : public Operation {
 public:
  Allgather(Signature signature, Part input, std::vector<Part> outputs);

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  void launch_steps();
  void launch_direct();
  void send_step();
  bool in_ring() const;
  // The rank of a host to which a rank's input goes.
  int carrier(int host, int source) const;
  // To whom this rank passes on what has come to it from another host.
  std::vector<Destination> receivers_of(int source) const;

  const Part input_;
  const std::vector<Part> outputs_;
  bool copied_ = false;
  // Members for small inputs:
  char* blocks_ = nullptr; // of this rank, the next rank, and so on
  int step_ = 0;
  int steps_ = 0;
  // Members for large inputs:
  std::vector<int> to_pass_on_; // ranks of other hosts whose inputs this rank passes on
};

} // namespace fog
