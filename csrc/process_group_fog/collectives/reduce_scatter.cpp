#include "collectives/reduce_scatter.hpp"

#include <algorithm>
#include <numeric>

#include "collectives/cutovers.hpp"
#include "collectives/schedules.hpp"
#include "collectives/two_level.hpp"

namespace fog {
namespace {

// The k-th slice belongs to the k-th rank in `order`.
Cut cut_in(const std::vector<int>& order, const std::vector<size_t>& numels) {
  Cut slices{{0}};
  for (const int rank : order) {
    slices.bounds.push_back(slices.bounds.back() + numels[rank]);
  }
  return slices;
}

std::vector<int> by_rank(size_t count) {
  std::vector<int> ranks(count);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// The hosts between which sums go. If one host has many ranks with little data each, each rank counts as a host.
Machines hosts_of(const Layout& layout) {
  if (layout.hosts.count() > 1) {
    return layout.hosts;
  }
  std::vector<std::vector<int>> alone;
  for (const int rank : layout.ranks) {
    alone.push_back({rank});
  }
  return Machines(std::move(alone), layout.ranks[layout.place]);
}

// Orders the ranks by lane: all ranks of the first lane by the place of their host, then of the second lane, and so on.
// On a host with more ranks than lanes, several ranks share a lane.
std::vector<int> order_by(const Machines& hosts, bool ring) {
  const auto by_place = two_level::order_of(hosts.count(), ring);
  std::vector<int> order;
  for (int lane = 0; lane < hosts.least(); ++lane) {
    for (const int host : by_place) {
      for (int place = lane; place < hosts.size(host); place += hosts.least()) {
        order.push_back(hosts.rank(host, place));
      }
    }
  }
  return order;
}

Slice slice_for(int rank, const std::vector<int>& order, const Cut& slices) {
  return slices.part(static_cast<int>(std::find(order.begin(), order.end(), rank) - order.begin()));
}

Schedule by_hosts(const Machines& hosts, const std::vector<int>& order, const Cut& slices, size_t bytes) {
  const bool ring = cutovers::in_ring(bytes, hosts);
  const int count = hosts.least();
  Cut lanes{{0}};
  Cut own{{}}; // the bounds of each place's part in this rank's lane
  int next = 0; // position in the order
  const auto by_place = two_level::order_of(hosts.count(), ring);
  for (int lane = 0; lane < count; ++lane) {
    for (const int host : by_place) {
      if (lane == hosts.place()) {
        own.bounds.push_back(slices.bounds[next]);
      }
      next += (hosts.size(host) - 1 - lane) / count + 1;
    }
    lanes.bounds.push_back(slices.bounds[next]);
    if (lane == hosts.place()) {
      own.bounds.push_back(slices.bounds[next]);
    }
  }
  Schedule schedule;
  const auto& local = hosts.local();
  const int place = hosts.place();
  two_level::scatter_in_host(schedule, hosts, lanes, false);
  if (place >= count) {
    schedule.await(local[place % count], two_level::kDown, slice_for(local[place], order, slices));
    return schedule;
  }
  two_level::scatter_between(schedule, two_level::Lane(hosts, ring), own);
  for (int other = place + count; other < static_cast<int>(local.size()); other += count) {
    schedule.send({local[other]}, two_level::kDown, slice_for(local[other], order, slices));
  }
  return schedule;
}

Schedule directly(const Layout& layout, const Cut& slices) {
  Schedule schedule;
  direct::scatter(schedule, layout.ranks, layout.place, 0, slices);
  return schedule;
}

} // namespace

std::vector<int> ReduceScatter::order(const Layout& layout, size_t bytes) {
  const auto hosts = hosts_of(layout);
  return cutovers::scatters_directly(bytes, layout) ? std::vector<int>() : order_by(hosts, cutovers::in_ring(bytes, hosts));
}

ReduceScatter::ReduceScatter(const Terms& terms, std::vector<const void*> inputs, const std::vector<size_t>& numels, void* out)
    : Reduction(terms, {directly(terms.layout, cut_in(by_rank(numels.size()), numels))}),
      inputs_(std::move(inputs)),
      slices_(cut_in(by_rank(numels.size()), numels)),
      data_(static_cast<char*>(out)),
      first_(slices_.bounds[static_cast<size_t>(terms.layout.place)]) {}

ReduceScatter::ReduceScatter(
    const Terms& terms, void* data, const std::vector<int>& order, const std::vector<size_t>& numels, size_t bytes)
    : Reduction(terms, {by_hosts(hosts_of(terms.layout), order, cut_in(order, numels), bytes)}),
      slices_(cut_in(order, numels)),
      data_(static_cast<char*>(data)) {}

const char* ReduceScatter::given(size_t begin) const {
  if (inputs_.empty()) {
    return data_ + begin * item();
  }
  const auto& bounds = slices_.bounds;
  const auto slice = std::upper_bound(bounds.begin(), bounds.end() - 1, begin) - bounds.begin() - 1;
  return static_cast<const char*>(inputs_[static_cast<size_t>(slice)]) + (begin - bounds[static_cast<size_t>(slice)]) * item();
}

char* ReduceScatter::place(size_t begin) const {
  return data_ + (begin - first_) * item();
}

} // namespace fog
