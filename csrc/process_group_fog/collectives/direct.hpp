// Sums of few ranks: each rank gets the data that it needs directly from each other rank. A rank sends n - 1 messages,
// with the fewest bytes possible. Each element is summed by one rank, or by all ranks in the same way, in the order of
// the ranks, and is rounded once.
#pragma once

#include <vector>

#include "collectives/schedule.hpp"

namespace fog::direct {

// All ranks get the sum of `elements`, in place. There must be so few elements that a send copies them at once.
void exchange(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, Slice elements, Terms terms);

// The rank with place k gets the sum of the k-th slice of the tensors as they were given.
void scatter(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, const Cut& slices);

} // namespace fog::direct
