#pragma once

#include "engine/operation.hpp"

namespace fog {

// No rank gets out before every rank is in: ceil(log2(size)) rounds, in round k a message to the rank 2^k further on
// (dissemination; D. Hensgen, R. Finkel and U. Manber, "Two algorithms for barrier synchronization", 1988,
// doi:10.1007/BF01379320).
class Barrier : public Operation {
 public:
  // Of a signature of the ranks' own it compares, for somebody else's operation: each rank sees that of the one before it.
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
