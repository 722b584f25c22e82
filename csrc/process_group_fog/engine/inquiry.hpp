// Finds the ranks that an operation lacks, by asking other ranks when its timeout is over.
//
// In an operation of several steps, a rank may wait for a rank that waits for another, so the awaited rank is often not
// the cause. The inquiry asks the awaited ranks, and the ranks that these name, until it has found those that have not
// come or do not answer.
#pragma once

#include <chrono>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "core/deadline.hpp"

namespace fog {

// The answer of a rank.
struct Reply {
  enum class State : int32_t {
    kAbsent, // the rank has not started the operation
    kWaits, // the rank is in the operation and waits for others
    kEnded, // the rank has ended the operation
  };
  // The most ranks that an answer names.
  static constexpr size_t kMostNamed = 8;

  State state = State::kAbsent;
  std::set<int> waits_for;

  // Conversion to and from a message. read() throws DistBackendError if the text is malformed.
  std::string written() const;
  static Reply read(const std::string& text, int size);
};

class Inquiry {
 public:
  explicit Inquiry(Deadline now) : end_(now + kTime) {}

  // Returns the ranks among `ranks` that should be asked and have not been asked yet.
  std::vector<int> next(const std::set<int>& ranks);
  void answer(int rank, const Reply& reply);

  // Returns whether all ranks have answered or the time for answers is over.
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
  // Ranks that have ended the operation, so without this rank.
  const std::set<int>& ended() const {
    return ended_;
  }

 private:
  // A rank that is not stuck answers sooner, also on a busy machine.
  static constexpr auto kTime = std::chrono::milliseconds(250);
  static constexpr size_t kMostAsked = 64;

  Deadline end_;
  std::set<int> asked_;
  std::set<int> silent_; // asked, without an answer yet
  std::set<int> absent_;
  std::set<int> ended_;
};

} // namespace fog
