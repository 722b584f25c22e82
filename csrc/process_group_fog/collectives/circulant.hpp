// Sums of many ranks, in slices, in as few rounds and as few bytes as can be: ceil(log2(n)) rounds, (n - 1)/n of a tensor to and from each
// rank, for any n (J. L. Traeff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024, arXiv:2410.14234, algorithms 1 and 2).
//
// Where n is a power of 2 these are the rounds and bytes of R. Rabenseifner's recursive halving and doubling ("Optimization of collective
// reduction operations", 2004, doi:10.1007/978-3-540-24685-5_1); where it is not, that takes two rounds and a tensor more, and a ring
// (P. Patarasuk and X. Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002) 2 (n - 1) rounds.
//
// Each element is summed by one rank at a time, in an order that depends on n and on its slice alone. Partial sums are in the tensor's
// dtype: in a type of 16 bits they are rounded in each round.
#pragma once

#include <vector>

#include "collectives/schedule.hpp"

namespace fog::circulant {

// How many numbers of messages each of these takes.
uint16_t messages(int ranks);

// The rank with place k gets the sum of the k-th slice. The places of the others are used up.
void scatter(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices);

// All get the k-th slice from the rank with place k.
void gather(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices);

} // namespace fog::circulant
