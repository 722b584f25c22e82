#include "engine/inquiry.hpp"

#include <algorithm>

#include <c10/util/Exception.h>

#include "core/copy.hpp"

namespace fog {

std::string Reply::written() const {
  std::vector<int32_t> numbers{static_cast<int32_t>(state)};
  for (const int rank : waits_for) {
    if (numbers.size() <= kMostNamed) {
      numbers.push_back(rank);
    }
  }
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int32_t)};
}

Reply Reply::read(const std::string& text, int size) {
  std::vector<int32_t> numbers(text.size() / sizeof(int32_t));
  copy_bytes(numbers.data(), text.data(), numbers.size() * sizeof(int32_t));
  const auto is_rank = [size](int32_t number) { return number >= 0 && number < size; };
  TORCH_CHECK_WITH(
      DistBackendError,
      !numbers.empty() && numbers[0] >= 0 && numbers[0] <= static_cast<int32_t>(State::kEnded) &&
          std::all_of(numbers.begin() + 1, numbers.end(), is_rank),
      "a rank's answer about the ranks that it waits for cannot be read");
  return {static_cast<State>(numbers[0]), {numbers.begin() + 1, numbers.end()}};
}

std::vector<int> Inquiry::next(const std::set<int>& ranks) {
  std::vector<int> unasked;
  for (const int rank : ranks) {
    if (asked_.size() < kMostAsked && asked_.insert(rank).second) {
      silent_.insert(rank);
      unasked.push_back(rank);
    }
  }
  return unasked;
}

void Inquiry::answer(int rank, const Reply& reply) {
  if (silent_.erase(rank) > 0 && reply.state != Reply::State::kWaits) {
    (reply.state == Reply::State::kAbsent ? absent_ : ended_).insert(rank);
  }
}

} // namespace fog
