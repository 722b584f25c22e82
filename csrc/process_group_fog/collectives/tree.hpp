// Sums of few elements over many ranks of a host, or of hosts: a rank has up to seven children and their children below it, as many as there
// are, in ceil(log8(n)) levels (a k-nomial tree, as in the k-nomial broadcasts and reductions of MPICH; k = 8 costs about as much
// in messages, one after the other, as the two hops that it saves). Each rank and all below it are neighbors in order, so the
// sum is in the order of the ranks, with brackets.
#pragma once

#include <vector>

#include "collectives/schedule.hpp"

namespace fog::tree {

// The first rank gets the sum.
void reduce(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, Slice elements, Terms terms, bool last);

// All get what the first rank has.
void spread(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, Slice elements);

} // namespace fog::tree
