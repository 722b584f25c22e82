#include "collectives/recursive_doubling.hpp"

#include <algorithm>

namespace fog {

void recursive_doubling(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, Slice elements) {
  const int count = static_cast<int>(ranks.size());
  int power = 1;
  while (2 * power <= count) {
    power *= 2;
  }
  const int pairs = count - power; // number of pairs of ranks that act as one
  const auto add = [&](int other, uint16_t message, bool last) {
    schedule.combine({ranks[std::min(place, other)], ranks[std::max(place, other)]}, message, elements, false, last);
  };
  const bool is_of_pair = place < 2 * pairs;
  if (is_of_pair && place % 2 == 1) {
    schedule.send({ranks[place - 1]}, first, elements);
    schedule.await(ranks[place - 1], first, elements);
    return;
  }
  if (is_of_pair) {
    add(place + 1, first, false);
  }
  const int number = is_of_pair ? place / 2 : place - pairs; // number among the remaining ranks
  uint16_t message = first;
  for (int bit = 1; bit < power; bit *= 2) {
    const int other = number ^ bit;
    const int partner = other < pairs ? 2 * other : other + pairs;
    schedule.send({ranks[partner]}, ++message, elements);
    add(partner, message, 2 * bit == power);
  }
  if (is_of_pair) {
    schedule.send({ranks[place + 1]}, first, elements);
  }
}

} // namespace fog
