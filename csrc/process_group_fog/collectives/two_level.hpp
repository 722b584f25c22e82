// Sums over hosts: within each host through its memory, then between hosts, then within each host again.
//
// No rank stands for its host. A tensor is cut into lanes, and each lane is one rank's of each host, which exchanges it with those of the
// other hosts: so a link carries one tensor, whatever the ranks a host, in parts that travel at once (the full-lane decomposition of
// J. L. Traeff, arXiv:1910.13373). There are as many lanes as the host with the fewest ranks has, or fewer. On a host that has more, ranks
// without a lane reduce a part of one.
#pragma once

#include <vector>

#include "collectives/schedule.hpp"
#include "core/machines.hpp"

namespace fog::two_level {

// Numbers of messages.
constexpr uint16_t kUp = 0;
constexpr uint16_t kHelp = 1; // to a lane
constexpr uint16_t kDown = 2;
constexpr uint16_t kBetween = 3; // and more

// From the tensors as they were given, the rank with place k in a host gets lane k of the sum over this host.
void scatter_in_host(Schedule& schedule, const Machines& hosts, const Cut& lanes, bool last);

// All of a host get lane k from the rank with place k.
void gather_in_host(Schedule& schedule, const Machines& hosts, const Cut& lanes);

// The ranks of this rank's lane, by host.
std::vector<int> lane_of(const Machines& hosts);

// Among the ranks of a lane: that of host k gets the sum of the k-th slice; all get the k-th slice from that of host k.
void scatter_between(Schedule& schedule, const Machines& hosts, const std::vector<int>& lane, const Cut& slices, bool few);
void gather_between(Schedule& schedule, const Machines& hosts, const std::vector<int>& lane, const Cut& slices, bool few);

} // namespace fog::two_level
