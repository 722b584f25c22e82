// Sums of few elements over many ranks of a host, or over many hosts, in ceil(log8(n)) hops: in each, the first of
// eight ranks, or of eight groups, adds their values (a k-nomial tree; k = 2 is the binomial tree of R. Thakur, R.
// Rabenseifner and W. Gropp, 2005, doi:10.1177/1094342005051521). Receiving seven small messages takes a rank less time
// than the two hops that a binomial tree would add. The added values belong to contiguous ranks, so the sum is in the
// order of the ranks, with brackets.
#pragma once

#include <vector>

#include "collectives/schedule.hpp"

namespace fog::tree {

// The places of the parent and the children in the tree.
struct Family {
  std::vector<int> children; // ascending
  int parent = -1; // -1 for the first rank
};
Family family_of(int place, int count);

// The first rank gets the sum.
void reduce(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, Slice elements, Terms terms, bool last);

// All ranks get the first rank's elements.
void spread(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, Slice elements);

} // namespace fog::tree
