#pragma once

#include <vector>

#include "collectives/compressed_sum.hpp"
#include "core/neighbor_plan.hpp"
#include "engine/operation.hpp"

namespace fog {

// NeighborAllreduce whose messages are encoded: out = neighbor_sum() of the decoded tensors of the sources and this
// rank's own tensor, or as Encoding says. `out` may be `in`. The rank encodes once, for all its destinations.
//
// A large tensor goes in pieces, each a message. So the first piece is on its way while the next ones are encoded, and
// pieces that have come are decoded while the rest is on its way.
class CompressedNeighborAllreduce : public Operation {
 public:
  CompressedNeighborAllreduce(
      Signature signature, NeighborPlan plan, const Encoding& encoding, const void* in, void* out, size_t numel);

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  struct Piece {
    CompressedSum sum;
    size_t offset; // of its first element, in bytes of the tensor
    size_t place; // in the message
  };

  const NeighborPlan plan_;
  const char* const in_;
  char* const out_;
  const bool encodes_; // whether anything needs this rank's message
  std::vector<Piece> pieces_; // their numbers are those of their messages
  size_t bytes_ = 0; // of all pieces
  char* message_ = nullptr;
  std::vector<uint8_t*> messages_; // of the sources
  size_t encoded_ = 0; // pieces
  size_t sent_ = 0;
  size_t summed_ = 0;
};

} // namespace fog
