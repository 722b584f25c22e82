// Sums over hosts: within each host through its memory, then between hosts, then within each host again.
//
// All ranks of a host take part. A tensor is cut into lanes. Each lane belongs to one rank of each host, which
// exchanges it with the lane's ranks of the other hosts: so a link carries one tensor, regardless of the number of
// ranks per host, in parts that travel at the same time (the full-lane decomposition of J. L. Traeff,
// arXiv:1910.13373). There are at most as many lanes as the smallest host has ranks. On a larger host, ranks without a
// lane reduce a part of a lane.
#pragma once

#include <vector>

#include "collectives/schedule.hpp"
#include "core/machines.hpp"

namespace fog::two_level {

// Message numbers.
constexpr uint16_t kUp = 0;
constexpr uint16_t kHelp = 1; // to the rank of a lane
constexpr uint16_t kDown = 2;
constexpr uint16_t kBetween = 3; // and up

// From the given tensors, the rank with place k in a host gets lane k of the sum over this host.
void scatter_in_host(Schedule& schedule, const Machines& hosts, const Cut& lanes, bool last);

// All ranks of a host get lane k from the rank with place k.
void gather_in_host(Schedule& schedule, const Machines& hosts, const Cut& lanes);

// The hosts in the order in which sums between them take them: by the reversed bits of their numbers. The largest
// messages of `circulant` go half way around this order, and the smallest ones to the next place. So hosts with close
// numbers, which are often close in the network, exchange the most: if the first half of 16 hosts is in one data center
// and the second half in another, a tensor crosses the line between them once each way instead of eight times.
std::vector<int> near_first(int hosts);
// The order for a ring, in which each host sends to the next one, is that of their numbers.
std::vector<int> order_of(int hosts, bool ring);

// The ranks of this rank's lane, one a host, in that order.
struct Lane {
  Lane(const Machines& machines, bool ring);

  bool ring; // sums go around a ring, see `ring`, or else as in `circulant`
  std::vector<int> hosts; // by place
  std::vector<int> ranks; // by place
  int place; // this rank's
  // The place of a host.
  int place_of(int host) const;
};

// Among the ranks of a lane: scatter_between() gives the rank with place k the sum of the k-th slice; gather_between()
// gives all ranks the k-th slice from the rank with place k.
void scatter_between(Schedule& schedule, const Lane& lane, const Cut& slices);
void gather_between(Schedule& schedule, const Lane& lane, const Cut& slices);

} // namespace fog::two_level
