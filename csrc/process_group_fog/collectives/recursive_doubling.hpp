#pragma once

#include <vector>

#include "collectives/schedule.hpp"

namespace fog {

// All get the sum of `elements`, in place, in log2(n) rounds: in round k a rank and the one whose number differs in bit k add what each has
// (recursive doubling; R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", 2005,
// doi:10.1177/1094342005051521, section 4.1). The one with the lower place comes first in both, so both have the same bits.
//
// Where n is no power of 2, the first ranks become one by pairs before, and those left out get the result afterwards: two hops more.
//
// A round sends what the next one changes: `elements` are so few that they are copied at once. Messages have numbers from `first` on.
void recursive_doubling(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, Slice elements);

} // namespace fog
