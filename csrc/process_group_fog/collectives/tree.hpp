// Sums of few elements over many ranks of a host, or of hosts, in ceil(log8(n)) hops: in each, the first of eight ranks, or of eight such
// groups, adds up what they have (a k-nomial tree; k = 2 is the binomial tree of R. Thakur, R. Rabenseifner and W. Gropp, 2005,
// doi:10.1177/1094342005051521). A rank takes seven small messages in the time that two more hops would need. What is added are neighbors,
// so the sum is in the order of the ranks, with brackets.
#pragma once

#include <vector>

#include "collectives/schedule.hpp"

namespace fog::tree {

// Places of those next to a rank in the tree.
struct Family {
  std::vector<int> children; // ascending
  int parent = -1; // of the first rank
};
Family family_of(int place, int count);

// The first rank gets the sum.
void reduce(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, Slice elements, Terms terms, bool last);

// All get what the first rank has.
void spread(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, Slice elements);

} // namespace fog::tree
