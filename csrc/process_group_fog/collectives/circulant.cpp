#include "collectives/circulant.hpp"

#include <algorithm>
#include <functional>

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
