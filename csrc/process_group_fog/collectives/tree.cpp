#include "collectives/tree.hpp"

namespace fog::tree {
namespace {

constexpr int kFan = 8;

} // namespace

// The parent of a place, in base 8, has a zero in place of its last nonzero digit.
Family family_of(int place, int count) {
  Family family;
  for (int digit = 1; digit < count; digit *= kFan) {
    if (place / digit % kFan != 0) {
      family.parent = place - place / digit % kFan * digit;
      break;
    }
    for (int child = place + digit; child < count && child < place + kFan * digit; child += digit) {
      family.children.push_back(child);
    }
  }
  return family;
}

void reduce(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, Slice elements, Terms terms, bool last) {
  const auto family = family_of(place, static_cast<int>(ranks.size()));
  const bool given = terms == Terms::kGiven;
  if (!family.children.empty() || family.parent < 0) {
    std::vector<int> from{ranks[place]};
    for (const int child : family.children) {
      from.push_back(ranks[child]);
    }
    schedule.combine(std::move(from), message, elements, given, last && family.parent < 0);
  }
  if (family.parent >= 0) {
    schedule.send({ranks[family.parent]}, message, elements, given && family.children.empty());
  }
}

void spread(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, Slice elements) {
  const auto family = family_of(place, static_cast<int>(ranks.size()));
  if (family.parent >= 0) {
    schedule.await(ranks[family.parent], message, elements);
  }
  std::vector<int> to;
  // Send first to the child with the most ranks below it.
  for (auto child = family.children.rbegin(); child != family.children.rend(); ++child) {
    to.push_back(ranks[*child]);
  }
  schedule.send(std::move(to), message, elements);
}

} // namespace fog::tree
