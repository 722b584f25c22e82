// The sum of a neighbor average whose terms arrive encoded.
#pragma once

#include <c10/util/ArrayRef.h>

#include "core/codecs/codecs.hpp"
#include "core/neighbor_plan.hpp"

namespace fog {

// How an exchange encodes.
struct Encoding {
  CodecPtr codec; // null if it does not
  // If it is set, the own term of the sum is the decoded own message too, which is written here.
  void* decoded = nullptr;
  // Whether the sum is own + sum over j of weight_j * decoded_j - (1 - self_weight) * decoded_own. What other ranks
  // gain is then what this rank loses: if weights conserve the sum over all ranks, so does the exchange, whatever the
  // codec's error.
  bool conserve = false;

  // Returns whether the sum needs this rank's own message.
  bool decodes_own() const {
    return decoded != nullptr || conserve;
  }
};

// Decodes messages of `numel` elements and adds them up, tile by tile: a tile of each term is decoded into the
// first-level cache, and the tiles are summed as neighbor_sum() sums tensors. So the result has the bits of
// neighbor_sum() of the decoded tensors, and memory is passed over as often as without a codec.
class CompressedSum {
 public:
  // The elements may be some units of a larger tensor.
  CompressedSum(Encoding encoding, c10::ScalarType dtype, size_t numel);

  // The bytes of a message.
  size_t bytes() const {
    return bytes_;
  }
  // Encodes `own` into bytes() bytes.
  void encode(const void* own, void* message) const;
  // Computes neighbor_sum() of the decoded `messages` of the plan's sources, with the weights `scales` that came with them.
  // `message` is this rank's own; it is needed if Encoding::decodes_own(). `out` may be `own`.
  void add(
      const NeighborPlan& plan,
      c10::ArrayRef<const uint8_t*> messages,
      c10::ArrayRef<double> scales,
      const void* own,
      const void* message,
      void* out) const;

 private:
  const Encoding encoding_;
  const c10::ScalarType dtype_;
  const size_t numel_;
  const size_t bytes_;
};

} // namespace fog
