#include "collectives/direct.hpp"

namespace fog::direct {
namespace {

// All others, beginning with the next rank, so that not all ranks send to the same rank first.
std::vector<int> others(const std::vector<int>& ranks, int place) {
  const int count = static_cast<int>(ranks.size());
  std::vector<int> others;
  others.reserve(ranks.size());
  for (int distance = 1; distance < count; ++distance) {
    others.push_back(ranks[(place + distance) % count]);
  }
  return others;
}

} // namespace

void exchange(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, Slice elements, Terms terms) {
  const bool given = terms == Terms::kGiven;
  schedule.send(others(ranks, place), message, elements, given);
  schedule.combine(ranks, message, elements, given, true);
}

void scatter(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, const Cut& slices) {
  const int count = static_cast<int>(ranks.size());
  for (int distance = 1; distance < count; ++distance) {
    const int other = (place + distance) % count;
    schedule.send({ranks[other]}, message, slices.part(other), true);
  }
  schedule.combine(ranks, message, slices.part(place), true, true);
}

} // namespace fog::direct
