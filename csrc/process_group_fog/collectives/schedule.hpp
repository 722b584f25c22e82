// What one rank does in a sum over ranks, step by step. Algorithms write it; a Reduction follows it, or several at once, one for each part of
// a large tensor.
//
// It depends on the layout of the ranks, the number of elements and the dtype, and on nothing else: so each element is summed in the same
// order in every run, by one rank, or by several that all do the same.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "collectives/slices.hpp"

namespace fog {

struct Schedule {
  // Messages of an algorithm have smaller numbers; those of the k-th part begin at k times this.
  static constexpr int kMessages = 63;
  static constexpr int kMessagesOfPart = 64;

  struct Step {
    enum class Kind {
      kSend, // this rank's `elements` to `ranks`
      kCombine, // those that come from `ranks`, in this order, in which this rank stands for what it has itself
      kAwait, // they come from `ranks`, and take the place of what is there
    };
    Kind kind;
    uint16_t message; // its number between two ranks: each is sent once, and those of one step are all that have it
    Slice elements;
    std::vector<int> ranks; // of the group
    bool given = false; // what is sent or combined is tensors as they were given to the operation, no partial sums
    bool last = false; // what is combined is the result
  };

  std::vector<Step> steps;
  uint16_t first_message = 0;

  void send(std::vector<int> to, uint16_t message, Slice elements, bool given = false) {
    if (!to.empty()) {
      steps.push_back({Step::Kind::kSend, number(message), elements, std::move(to), given, false});
    }
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

// What an algorithm's ranks have at its beginning.
enum class Terms : bool { kPartial, kGiven };

} // namespace fog
