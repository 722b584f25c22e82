#pragma once

#include "engine/operation.hpp"

namespace fog {

// No rank leaves before every rank has entered. In round k of ceil(log2(size)) rounds, a rank sends a message to the
// rank 2^k places after it (dissemination; D. Hensgen, R. Finkel and U. Manber, "Two algorithms for barrier
// synchronization", 1988, doi:10.1007/BF01379320).
class Barrier : public Operation {
 public:
  // With the signature of another operation, the barrier compares the signatures of all ranks: each rank checks the
  // signature of the rank before it.
  explicit Barrier(Signature signature = {}) : Operation(signature) {}

 protected:
  void launch() override;
  Action advance() override;

 private:
  void send_round();

  uint16_t round_ = 0;
  uint16_t rounds_ = 0;
};

} // namespace fog
