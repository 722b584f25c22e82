#include "collectives/ring.hpp"

namespace fog::ring {

void scatter(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices) {
  const int count = static_cast<int>(ranks.size());
  const int previous = ranks[(place + count - 1) % count];
  for (int hop = 1; hop < count; ++hop, ++first) {
    schedule.send({ranks[(place + 1) % count]}, first, slices.part((place + count - hop) % count));
    schedule.combine({previous, ranks[place]}, first, slices.part((place + 2 * count - hop - 1) % count), false, hop + 1 == count);
  }
}

void gather(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices) {
  const int count = static_cast<int>(ranks.size());
  for (int hop = 1; hop < count; ++hop, ++first) {
    schedule.send({ranks[(place + 1) % count]}, first, slices.part((place + count - hop + 1) % count));
    schedule.await(ranks[(place + count - 1) % count], first, slices.part((place + count - hop) % count));
  }
}

} // namespace fog::ring
