// Who keeps an operation from its end: asked of other ranks when its time is over.
//
// In an operation of several steps a rank waits for one that waits for another, so whom it waits for says little. At its time-out it asks
// these, and whom they name, until it has found those that have not come, or do not answer.
#pragma once

#include <chrono>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "core/deadline.hpp"

namespace fog {

// What a rank answers.
struct Standing {
  enum class State : int32_t {
    kAbsent, // it has not come to the operation
    kWaits, // it has, and waits for others
    kEnded, // it needs nobody any more
  };
  // As many ranks as an answer names.
  static constexpr size_t kMostNamed = 8;

  State state = State::kAbsent;
  std::set<int> waits_for;

  // For a message; read() throws DistBackendError if the text cannot be one.
  std::string written() const;
  static Standing read(const std::string& text, int size);
};

class Inquiry {
 public:
  explicit Inquiry(Deadline now) : end_(now + kTime) {}

  // Those of `ranks` that are to be asked, and have not been.
  std::vector<int> next(const std::set<int>& ranks);
  void answer(int rank, const Standing& standing);

  // Whether all have answered, or had time to.
  bool is_over(Deadline now) const {
    return silent_.empty() || now >= end_;
  }
  Deadline end() const {
    return end_;
  }
  const std::set<int>& absent() const {
    return absent_;
  }
  const std::set<int>& silent() const {
    return silent_;
  }
  // Those that need nobody any more, this rank as little as others.
  const std::set<int>& ended() const {
    return ended_;
  }

 private:
  // An answer takes less, also on a busy machine, if its rank is not stuck.
  static constexpr auto kTime = std::chrono::milliseconds(250);
  static constexpr size_t kMostAsked = 64;

  Deadline end_;
  std::set<int> asked_;
  std::set<int> silent_; // asked, and without an answer
  std::set<int> absent_;
  std::set<int> ended_;
};

} // namespace fog
