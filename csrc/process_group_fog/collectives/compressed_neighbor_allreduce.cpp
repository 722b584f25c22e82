#include "collectives/compressed_neighbor_allreduce.hpp"

#include <algorithm>

namespace fog {
namespace {

// The least bytes of a piece's message, and the most pieces.
constexpr size_t kPieceBytes = size_t(1) << 20;
constexpr size_t kMostPieces = 32;

} // namespace

CompressedNeighborAllreduce::CompressedNeighborAllreduce(
    Signature signature, NeighborPlan plan, const Encoding& encoding, const void* in, void* out, size_t numel)
    : Operation(signature),
      plan_(std::move(plan)),
      in_(static_cast<const char*>(in)),
      out_(static_cast<char*>(out)),
      encodes_(!plan_.destinations().empty() || encoding.decodes_own()) {
  const auto dtype = static_cast<c10::ScalarType>(signature.dtype);
  const size_t item = c10::elementSize(dtype);
  const auto& codec = *encoding.codec;
  const size_t unit = codec.unit(dtype).elements; // 0 if messages cannot be cut
  const size_t count = unit == 0 ? 1 : std::clamp<size_t>(codec.bytes(dtype, numel) / kPieceBytes, 1, kMostPieces);
  const size_t units = unit == 0 ? 0 : (numel + unit - 1) / unit;
  const size_t elements = count == 1 ? numel : (units + count - 1) / count * unit;
  for (size_t first = 0; first < numel || pieces_.empty(); first += elements) {
    auto own = encoding;
    if (own.decoded != nullptr) {
      own.decoded = static_cast<char*>(own.decoded) + first * item;
    }
    pieces_.push_back({CompressedSum(std::move(own), dtype, std::min(elements, numel - first)), first * item, bytes_});
    bytes_ += pieces_.back().sum.bytes();
  }
}

void CompressedNeighborAllreduce::launch() {
  for (const auto& source : plan_.sources()) {
    messages_.push_back(static_cast<uint8_t*>(scratch(bytes_)));
    for (size_t number = 0; number < pieces_.size(); ++number) {
      const auto& piece = pieces_[number];
      receive(source.rank, static_cast<uint16_t>(number), messages_.back() + piece.place, piece.sum.bytes());
    }
  }
  if (encodes_) {
    message_ = static_cast<char*>(scratch(bytes_));
  }
}

Operation::Action CompressedNeighborAllreduce::advance() {
  if (encodes_) {
    for (; sent_ < encoded_; ++sent_) {
      c10::SmallVector<Destination, 8> destinations;
      for (const auto& destination : plan_.destinations()) {
        destinations.push_back({destination.rank, destination.weight});
      }
      const auto& piece = pieces_[sent_];
      const auto step = static_cast<uint16_t>(sent_);
      send(destinations, step, message_ + piece.place, piece.sum.bytes(), sent_ == 0);
    }
    if (encoded_ < pieces_.size()) {
      return Action::kCompute; // outside of the engine's lock
    }
  }
  if (summed_ == pieces_.size()) {
    return Action::kDone;
  }
  return received(static_cast<uint16_t>(summed_)) ? Action::kCompute : Action::kWait;
}

void CompressedNeighborAllreduce::compute() {
  if (encodes_ && encoded_ < pieces_.size()) {
    const auto& piece = pieces_[encoded_];
    piece.sum.encode(in_ + piece.offset, message_ + piece.place);
    ++encoded_;
    return;
  }
  const auto& piece = pieces_[summed_];
  c10::SmallVector<const uint8_t*, 2> messages;
  c10::SmallVector<double, 2> scales;
  for (size_t i = 0; i < messages_.size(); ++i) {
    messages.push_back(messages_[i] + piece.place);
    scales.push_back(header(i * pieces_.size() + summed_).scale);
  }
  const char* message = message_ == nullptr ? nullptr : message_ + piece.place;
  piece.sum.add(plan_, messages, scales, in_ + piece.offset, message, out_ + piece.offset);
  ++summed_;
}

} // namespace fog
