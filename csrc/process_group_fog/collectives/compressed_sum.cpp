#include "collectives/compressed_sum.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/arithmetic.hpp"
#include "core/copy.hpp"

namespace fog {
namespace {

// The tiles of all terms together; they stay in the first-level cache.
constexpr size_t kTilesBytes = size_t(24) << 10;

// Copies bytes `begin` to `end` of an input.
void gather(const Input& input, size_t begin, size_t end, uint8_t* to) {
  if (input.data != nullptr) {
    copy_bytes(to, static_cast<const char*>(input.data) + begin, end - begin);
    return;
  }
  for (const auto& block : input.blocks) {
    const size_t first = std::max(begin, block.begin);
    const size_t last = std::min(end, block.end);
    if (first < last) {
      std::memcpy(to + (first - begin), block.data + (first - block.begin), last - first);
    }
  }
}

} // namespace

CompressedSum::CompressedSum(Encoding encoding, c10::ScalarType dtype, size_t numel)
    : encoding_(std::move(encoding)),
      dtype_(dtype),
      numel_(numel),
      bytes_(encoding_.codec->bytes(dtype, numel)),
      whole_(encoding_.codec->unit(dtype).elements == 0),
      unit_(whole_ ? Codec::Unit{std::max<size_t>(numel, 1), std::max<size_t>(bytes_, 1)} : encoding_.codec->unit(dtype)) {}

void CompressedSum::encode(const void* own, void* message) const {
  encoding_.codec->encode(dtype_, own, numel_, static_cast<uint8_t*>(message));
}

// Bytes `begin` to `end` of a message, of which those before `from` are in `rest`, which begins at a unit.
const uint8_t* CompressedSum::contiguous(Arrived& message, const Input& input, size_t from, size_t begin, size_t end) const {
  if (begin >= from) {
    if (input.data != nullptr) {
      return static_cast<const uint8_t*>(input.data) + begin;
    }
    for (const auto& block : input.blocks) {
      if (block.begin <= begin && end <= block.end) {
        return reinterpret_cast<const uint8_t*>(block.data) + (begin - block.begin);
      }
    }
  }
  message.joined.resize(end - begin);
  const size_t kept = begin < from ? from - begin : 0;
  copy_bytes(message.joined.data(), message.rest.data(), kept);
  gather(input, begin + kept, end, message.joined.data() + kept);
  return message.joined.data();
}

// The weights of the decoded messages of sources, then of the own term and, to conserve the sum, of the own tensor.
NeighborWeights CompressedSum::weights_of(const NeighborPlan& plan, c10::ArrayRef<NeighborTerm> terms) const {
  c10::SmallVector<double, 8> scales;
  for (const auto& term : terms) {
    scales.push_back(term.scale);
  }
  NeighborWeights weights(plan, scales);
  if (encoding_.conserve) {
    weights.conserve();
  }
  return weights;
}

void CompressedSum::add(
    const NeighborPlan& plan,
    c10::ArrayRef<NeighborTerm> terms,
    const void* own,
    const void* message,
    void* out,
    size_t from,
    size_t to) {
  const auto& codec = *encoding_.codec;
  const size_t item = c10::elementSize(dtype_);
  const auto weights = weights_of(plan, terms);
  arrived_.resize(terms.size());

  // Whole units only. The last unit may be short, and ends with the message.
  const size_t first_unit = from / unit_.bytes;
  const size_t last_unit = to == bytes_ ? (bytes_ + unit_.bytes - 1) / unit_.bytes : to / unit_.bytes;
  const size_t begin = std::min(first_unit * unit_.elements, numel_);
  const size_t end = std::min(last_unit * unit_.elements, numel_);
  const size_t terms_bytes = (weights.sources.size() + 1) * item;
  const size_t most = whole_ ? std::max<size_t>(kTilesBytes / terms_bytes, 64)
                             : std::max<size_t>(kTilesBytes / terms_bytes / unit_.elements, 1) * unit_.elements;
  tiles_.resize((weights.sources.size() + 1) * most * item); // the last one for the own message

  auto* decoded = static_cast<char*>(encoding_.decoded);
  Codec::Places own_places;
  c10::SmallVector<const uint8_t*, 8> messages(weights.sources.size(), nullptr);
  if (whole_ && begin < end) {
    for (size_t i = 0; i < weights.sources.size(); ++i) {
      auto& arrived = arrived_[weights.sources[i]];
      messages[i] = contiguous(arrived, terms[weights.sources[i]].input, from, 0, bytes_);
      arrived.places = codec.open(dtype_, numel_, messages[i]);
    }
    if (encoding_.decodes_own()) {
      own_places = codec.open(dtype_, numel_, static_cast<const uint8_t*>(message));
    }
  }

  std::vector<const void*> inputs;
  for (size_t element = begin; element < end; element += most) {
    const size_t count = std::min(most, end - element);
    const size_t at = whole_ ? 0 : element / unit_.elements * unit_.bytes; // in the message
    const size_t next = whole_ || element + count == numel_ ? bytes_ : at + count / unit_.elements * unit_.bytes;
    const char* own_values = static_cast<const char*>(own) + element * item;
    inputs.clear();
    for (size_t i = 0; i < weights.sources.size(); ++i) {
      const size_t source = weights.sources[i];
      auto& arrived = arrived_[source];
      const uint8_t* data = whole_ ? messages[i] : contiguous(arrived, terms[source].input, from, at, next);
      char* tile = tiles_.data() + i * most * item;
      codec.decode(dtype_, numel_, arrived.places, data, element, count, tile);
      inputs.push_back(tile);
    }
    if (encoding_.decodes_own()) {
      char* place = decoded != nullptr ? decoded + element * item : tiles_.data() + weights.sources.size() * most * item;
      codec.decode(dtype_, numel_, own_places, static_cast<const uint8_t*>(message) + at, element, count, place);
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

  if (to < bytes_) {
    const size_t kept = last_unit * unit_.bytes; // the rest begins here
    for (const size_t source : weights.sources) {
      auto& rest = arrived_[source].rest;
      const size_t first = std::max(from, kept);
      if (kept >= from) {
        rest.clear();
      }
      const size_t size = rest.size();
      rest.resize(size + (to - first));
      gather(terms[source].input, first, to, rest.data() + size);
    }
  }
}

} // namespace fog
