#include "collectives/compressed_sum.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/arithmetic.hpp"

namespace fog {
namespace {

// The tiles of all terms together; they stay in the first-level cache.
constexpr size_t kTilesBytes = size_t(24) << 10;

} // namespace

CompressedSum::CompressedSum(Encoding encoding, c10::ScalarType dtype, size_t numel)
    : encoding_(std::move(encoding)), dtype_(dtype), numel_(numel), bytes_(encoding_.codec->bytes(dtype, numel)) {}

void CompressedSum::encode(const void* own, void* message) const {
  encoding_.codec->encode(dtype_, own, numel_, static_cast<uint8_t*>(message));
}

void CompressedSum::add(
    const NeighborPlan& plan,
    c10::ArrayRef<const uint8_t*> messages,
    c10::ArrayRef<double> scales,
    const void* own,
    const void* message,
    void* out) const {
  if (numel_ == 0) {
    return;
  }
  const auto& codec = *encoding_.codec;
  const size_t item = c10::elementSize(dtype_);
  // of the decoded messages of sources, then of the own term and, to conserve the sum, of the own tensor
  NeighborWeights weights(plan, scales);
  if (encoding_.conserve) {
    weights.conserve();
  }
  const size_t sources = weights.sources.size();
  const auto unit = codec.unit(dtype_);
  const size_t tile_elements = kTilesBytes / ((sources + 1) * item);
  const size_t most =
      unit.elements == 0 ? std::max<size_t>(tile_elements, 64) : std::max<size_t>(tile_elements / unit.elements, 1) * unit.elements;
  std::vector<char> tiles((sources + 1) * most * item); // the last one for the own message

  // Decodes a part of a message.
  const auto decode = [&](const uint8_t* data, const Codec::Places& places, size_t element, size_t count, void* to) {
    const size_t at = unit.elements == 0 ? 0 : element / unit.elements * unit.bytes;
    codec.decode(dtype_, numel_, places, data + at, element, count, to);
  };
  std::vector<Codec::Places> places;
  for (const size_t source : weights.sources) {
    places.push_back(codec.open(dtype_, numel_, messages[source]));
  }
  const auto* own_message = static_cast<const uint8_t*>(message);
  const auto own_places = encoding_.decodes_own() ? codec.open(dtype_, numel_, own_message) : Codec::Places();
  auto* decoded = static_cast<char*>(encoding_.decoded);
  std::vector<const void*> inputs;
  for (size_t element = 0; element < numel_; element += most) {
    const size_t count = std::min(most, numel_ - element);
    const char* own_values = static_cast<const char*>(own) + element * item;
    inputs.clear();
    for (size_t i = 0; i < sources; ++i) {
      char* tile = tiles.data() + i * most * item;
      decode(messages[weights.sources[i]], places[i], element, count, tile);
      inputs.push_back(tile);
    }
    if (encoding_.decodes_own()) {
      char* place = decoded != nullptr ? decoded + element * item : tiles.data() + sources * most * item;
      decode(own_message, own_places, element, count, place);
      if (weights.own) {
        inputs.push_back(place);
      }
      if (encoding_.conserve) {
        inputs.push_back(own_values);
      }
    } else if (weights.own) {
      inputs.push_back(own_values);
    }
    char* result = static_cast<char*>(out) + element * item;
    if (inputs.empty()) {
      std::memset(result, 0, count * item);
    } else {
      weighted_sum(dtype_, result, inputs, weights.weights, weights.mean, count);
    }
  }
}

} // namespace fog
