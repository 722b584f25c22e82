// The steps of one rank in a sum over ranks. Algorithms create schedules; a Reduction follows one, or several at the
// same time, one for each part of a large tensor.
//
// A schedule depends only on the layout of the ranks, the number of elements and the dtype, so each element is summed
// in the same order in every run, by one rank or by several ranks in the same way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace fog {

// --- cutting a tensor into slices ---

struct Slice {
  size_t begin;
  size_t numel;
};

// Slice `index` of `count` nearly equal slices of `numel` elements.
inline Slice slice_of(size_t numel, int index, int count) {
  const size_t begin = numel * static_cast<size_t>(index) / static_cast<size_t>(count);
  const size_t end = numel * (static_cast<size_t>(index) + 1) / static_cast<size_t>(count);
  return {begin, end - begin};
}

// Consecutive slices; the k-th reaches from bounds[k] to bounds[k + 1].
struct Cut {
  std::vector<size_t> bounds;

  int count() const {
    return static_cast<int>(bounds.size()) - 1;
  }
  // The union of `many` slices from `first` on.
  Slice part(int first, int many = 1) const {
    return {bounds[first], bounds[first + many] - bounds[first]};
  }
};

// Nearly equal slices.
inline Cut cut(Slice whole, int count) {
  Cut slices;
  slices.bounds.reserve(static_cast<size_t>(count) + 1);
  for (int index = 0; index < count; ++index) {
    slices.bounds.push_back(whole.begin + slice_of(whole.numel, index, count).begin);
  }
  slices.bounds.push_back(whole.begin + whole.numel);
  return slices;
}

// --- schedules ---

// All of `ranks` but the one at `place`, beginning with the next one, so that not all ranks send to the same rank first.
inline std::vector<int> others_of(const std::vector<int>& ranks, int place) {
  std::vector<int> others(ranks.begin() + place + 1, ranks.end());
  others.insert(others.end(), ranks.begin(), ranks.begin() + place);
  return others;
}

struct Schedule {
  // The messages of an algorithm have smaller numbers than kMessages; the messages of the k-th part begin at k *
  // kMessagesOfPart.
  static constexpr int kMessages = 63;
  static constexpr int kMessagesOfPart = 64;

  struct Step {
    enum class Kind {
      kSend, // sends this rank's `elements` to `ranks`
      kCombine, // adds the elements of `ranks`, in this order; this rank stands for its own elements
      kAwait, // receives the elements from `ranks` and replaces its own
    };
    Kind kind;
    uint16_t message; // unique between two ranks, except for the messages of one step
    Slice elements;
    std::vector<int> ranks; // of the group
    bool given = false; // whether tensors are sent or combined as they were given, not partial sums
    bool last = false; // whether the combined elements are the result
    bool only_sender = false; // whether no other rank sends to the receiver while this step does
  };

  std::vector<Step> steps;
  uint16_t first_message = 0;

  void send(std::vector<int> to, uint16_t message, Slice elements, bool given = false) {
    if (!to.empty()) {
      steps.push_back({Step::Kind::kSend, number(message), elements, std::move(to), given, false});
    }
  }
  // Sends around a ring, in which each rank receives from one rank only.
  void send_in_ring(int to, uint16_t message, Slice elements) {
    steps.push_back({Step::Kind::kSend, number(message), elements, {to}, false, false, true});
  }
  void combine(std::vector<int> from, uint16_t message, Slice elements, bool given, bool last) {
    steps.push_back({Step::Kind::kCombine, number(message), elements, std::move(from), given, last});
  }
  void await(int from, uint16_t message, Slice elements) {
    steps.push_back({Step::Kind::kAwait, number(message), elements, {from}, false, false});
  }

 private:
  uint16_t number(uint16_t message) const {
    return static_cast<uint16_t>(first_message + message);
  }
};

// The data that an algorithm's ranks have at its beginning.
enum class Terms : bool { kPartial, kGiven };

} // namespace fog
