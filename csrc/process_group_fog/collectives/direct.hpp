// Sums of few ranks: each gets from each other one what it needs, in one hop. n - 1 messages a rank, and as few bytes as can be; each
// element is summed by one rank, or by all alike, in the order of the ranks and rounded once.
#pragma once

#include <vector>

#include "collectives/schedule.hpp"

namespace fog::direct {

// All get the sum of `elements`, in place. They are so few that what is sent is copied at once.
void exchange(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, Slice elements, Terms terms);

// The rank with place k gets the sum of the k-th slice.
void scatter(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, const Cut& slices, Terms terms, bool last);

// All get the k-th slice from the rank with place k.
void gather(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, const Cut& slices);

} // namespace fog::direct
