// Sums of large tensors in slices that go around a ring (P. Patarasuk and X. Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002):
// n - 1 hops for the sums and as many for the results, with the fewest bytes possible.
//
// Each rank sends to one rank and receives from one, all the time. So no two senders share the link of a receiver while
// another link is idle: with several tensors in flight on slow links, the other algorithms use two thirds of the links,
// and a ring uses all but what headers take.
//
// Each element is summed by one rank at a time, from the one behind its slice's rank on, around the ring. Partial sums
// have the tensor's dtype: 16-bit types are rounded in each hop.
#pragma once

#include <vector>

#include "collectives/schedule.hpp"

namespace fog::ring {

// The rank with place k gets the sum of the k-th slice. The memory of the other slices is overwritten.
void scatter(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices);

// All ranks get the k-th slice from the rank with place k. Each of the two takes n - 1 message numbers.
void gather(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices);

} // namespace fog::ring
