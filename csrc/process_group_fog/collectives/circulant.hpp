// Sums of many ranks, in slices, with the fewest rounds and bytes: ceil(log2(n)) rounds, and (n - 1)/n of a tensor to
// and from each rank, for any n (J. L. Traeff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024,
// arXiv:2410.14234, algorithms 1 and 2).
//
// If n is a power of 2, these are the rounds and bytes of R. Rabenseifner's recursive halving and doubling
// ("Optimization of collective reduction operations", 2004, doi:10.1007/978-3-540-24685-5_1). For other n, that
// algorithm takes two more rounds and one more tensor, and a ring (P. Patarasuk and X. Yuan, 2009,
// doi:10.1016/j.jpdc.2008.09.002) takes 2 (n - 1) rounds.
//
// Each element is summed by one rank at a time, in an order that depends only on n and on its slice. Partial sums have
// the tensor's dtype: 16-bit types are rounded in each round.
#pragma once

#include <vector>

#include "collectives/schedule.hpp"

namespace fog::circulant {

// The number of message numbers that each of the two algorithms uses.
uint16_t messages(int ranks);

// The rank with place k gets the sum of the k-th slice. The memory of the other slices is overwritten.
void scatter(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices);

// All ranks get the k-th slice from the rank with place k.
void gather(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices);

} // namespace fog::circulant
