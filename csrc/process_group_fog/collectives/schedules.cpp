#include "collectives/schedules.hpp"

#include <algorithm>
#include <functional>

namespace fog::direct {

void exchange(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, Slice elements, Terms terms) {
  const bool given = terms == Terms::kGiven;
  schedule.send(others_of(ranks, place), message, elements, given);
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

namespace fog::ring {

void scatter(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices) {
  const int count = static_cast<int>(ranks.size());
  const int previous = ranks[(place + count - 1) % count];
  for (int hop = 1; hop < count; ++hop, ++first) {
    schedule.send_in_ring(ranks[(place + 1) % count], first, slices.part((place + count - hop) % count));
    schedule.combine({previous, ranks[place]}, first, slices.part((place + 2 * count - hop - 1) % count), false, hop + 1 == count);
  }
}

void gather(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices) {
  const int count = static_cast<int>(ranks.size());
  for (int hop = 1; hop < count; ++hop, ++first) {
    schedule.send_in_ring(ranks[(place + 1) % count], first, slices.part((place + count - hop + 1) % count));
    schedule.await(ranks[(place + count - 1) % count], first, slices.part((place + count - hop) % count));
  }
}

} // namespace fog::ring

namespace fog::circulant {
namespace {

// Slices are counted from this rank's own slice, and neighbors from this rank. A round reduces `from` remaining slices
// to half of them, rounded up.
int half(int from) {
  return (from + 1) / 2;
}

int rounds(int count) {
  int rounds = 0;
  for (int left = count; left > 1; left = half(left)) {
    ++rounds;
  }
  return rounds;
}

// Calls `use` for slices `first` to `first + many` of `count`: as one piece, or as two if they wrap around the end.
void for_pieces_of(const Cut& slices, int first, int many, const std::function<void(uint16_t piece, Slice elements)>& use) {
  const int count = slices.count();
  first %= count;
  const int before_end = std::min(many, count - first);
  use(0, slices.part(first, before_end));
  if (before_end < many) {
    use(1, slices.part(0, many - before_end));
  }
}

} // namespace

uint16_t messages(int ranks) {
  return static_cast<uint16_t>(2 * rounds(ranks));
}

void scatter(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices) {
  const int count = static_cast<int>(ranks.size());
  for (int left = count; left > 1; left = half(left), first += 2) {
    const int hop = half(left);
    const int next = ranks[(place + hop) % count];
    const int previous = ranks[(place - hop + count) % count];
    for_pieces_of(
        slices, place + hop, left - hop, [&](uint16_t piece, Slice elements) { schedule.send({next}, first + piece, elements); });
    for_pieces_of(slices, place, left - hop, [&](uint16_t piece, Slice elements) {
      schedule.combine({previous, ranks[place]}, first + piece, elements, false, hop == 1);
    });
  }
}

void gather(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices) {
  const int count = static_cast<int>(ranks.size());
  std::vector<int> lefts; // the rounds of scatter() in reverse order
  for (int left = count; left > 1; left = half(left)) {
    lefts.push_back(left);
  }
  std::reverse(lefts.begin(), lefts.end());
  for (const int left : lefts) {
    const int hop = half(left);
    const int next = ranks[(place + hop) % count];
    const int previous = ranks[(place - hop + count) % count];
    for_pieces_of(
        slices, place, left - hop, [&](uint16_t piece, Slice elements) { schedule.send({previous}, first + piece, elements); });
    for_pieces_of(
        slices, place + hop, left - hop, [&](uint16_t piece, Slice elements) { schedule.await(next, first + piece, elements); });
    first += 2;
  }
}

} // namespace fog::circulant
