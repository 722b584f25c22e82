// The algorithms of sums between ranks, as schedules.
#pragma once

#include <vector>

#include "collectives/schedule.hpp"

// Sums of few ranks: each rank gets the data that it needs directly from each other rank. A rank sends n - 1 messages,
// with the fewest bytes possible. Each element is summed by one rank, or by all ranks in the same way, in the order of
// the ranks, and is rounded once.
namespace fog::direct {

// All ranks get the sum of `elements`, in place. There must be so few elements that a send copies them at once.
void exchange(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, Slice elements, Terms terms);

// The rank with place k gets the sum of the k-th slice of the tensors as they were given.
void scatter(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t message, const Cut& slices);

} // namespace fog::direct

// Sums of few elements over many ranks of a host, or over many hosts, in ceil(log8(n)) hops: in each, the first of
// eight ranks, or of eight groups, adds their values (a k-nomial tree; k = 2 is the binomial tree of R. Thakur, R.
// Rabenseifner and W. Gropp, 2005, doi:10.1177/1094342005051521). Receiving seven small messages takes a rank less time
// than the two hops that a binomial tree would add. The added values belong to contiguous ranks, so the sum is in the
// order of the ranks, with brackets.
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

// Sums of large tensors in slices that go around a ring (P. Patarasuk and X. Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002):
// n - 1 hops for the sums and as many for the results, with the fewest bytes possible.
//
// Each rank sends to one rank and receives from one, all the time. So no two senders share the link of a receiver while
// another link is idle: with several tensors in flight on slow links, the other algorithms use two thirds of the links,
// and a ring uses all but what headers take.
//
// Each element is summed by one rank at a time, from the one behind its slice's rank on, around the ring. Partial sums
// have the tensor's dtype: 16-bit types are rounded in each hop.
namespace fog::ring {

// The rank with place k gets the sum of the k-th slice. The memory of the other slices is overwritten.
void scatter(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices);

// All ranks get the k-th slice from the rank with place k. Each of the two takes n - 1 message numbers.
void gather(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices);

} // namespace fog::ring

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
namespace fog::circulant {

// The number of message numbers that each of the two algorithms uses.
uint16_t messages(int ranks);

// The rank with place k gets the sum of the k-th slice. The memory of the other slices is overwritten.
void scatter(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices);

// All ranks get the k-th slice from the rank with place k.
void gather(Schedule& schedule, const std::vector<int>& ranks, int place, uint16_t first, const Cut& slices);

} // namespace fog::circulant
