#pragma once

#include <vector>

#include "collectives/schedule.hpp"

namespace fog {

// All ranks get the sum of `elements`, in place, in log2(n) rounds: in round k, a rank and the rank whose number
// differs in bit k exchange and add their sums (recursive doubling; R. Thakur, R. Rabenseifner and W. Gropp,
// "Optimization of collective communication operations in MPICH", 2005, doi:10.1177/1094342005051521, section 4.1).
// Both add in the order of their places, so both get the same bits.
//
// If n is not a power of 2, the first ranks form pairs that act as one rank: the second rank of a pair sends its
// elements to the first before the rounds and gets the result afterwards. This takes two more hops.
//
// A round sends data that the next round changes, so there must be so few `elements` that a send copies them at once.
// Messages are numbered from `first`.
void recursive_doubling(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, Slice elements);

} // namespace fog
