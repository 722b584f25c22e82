#include "collectives/two_level.hpp"

#include <algorithm>
#include <numeric>

#include "collectives/schedules.hpp"

namespace fog::two_level {
namespace {

// Places `lane`, `lane` + lanes, ... of a host share a lane.
Slice share_of(const Cut& lanes, int place, int size) {
  const int lane = place % lanes.count();
  const int sharing = (size - 1 - lane) / lanes.count() + 1;
  const auto whole = lanes.part(lane);
  const auto share = slice_of(whole.numel, place / lanes.count(), sharing);
  return {whole.begin + share.begin, share.numel};
}

} // namespace

void scatter_in_host(Schedule& schedule, const Machines& hosts, const Cut& lanes, bool last) {
  const auto& local = hosts.local();
  const int size = static_cast<int>(local.size());
  const int place = hosts.place();
  for (int distance = 1; distance < size; ++distance) {
    const int other = (place + distance) % size;
    schedule.send({local[other]}, kUp, share_of(lanes, other, size), true);
  }
  const auto share = share_of(lanes, place, size);
  schedule.combine(local, kUp, share, true, last);
  if (place >= lanes.count()) {
    schedule.send({local[place % lanes.count()]}, kHelp, share);
    return;
  }
  for (int helper = place + lanes.count(); helper < size; helper += lanes.count()) {
    schedule.await(local[helper], kHelp, share_of(lanes, helper, size));
  }
}

void gather_in_host(Schedule& schedule, const Machines& hosts, const Cut& lanes) {
  const auto& local = hosts.local();
  const int place = hosts.place();
  if (place < lanes.count()) {
    schedule.send(others_of(local, place), kDown, lanes.part(place));
  }
  for (int lane = 0; lane < lanes.count(); ++lane) {
    if (lane != place) {
      schedule.await(local[lane], kDown, lanes.part(lane));
    }
  }
}

std::vector<int> near_first(int hosts) {
  const auto reversed = [hosts](int number) {
    int bits = 0;
    for (int top = 1; top < hosts; top *= 2, number /= 2) {
      bits = 2 * bits + number % 2;
    }
    return bits;
  };
  std::vector<int> order(hosts);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int one, int other) { return reversed(one) < reversed(other); });
  return order;
}

std::vector<int> order_of(int hosts, bool ring) {
  auto order = near_first(hosts);
  if (ring) {
    std::sort(order.begin(), order.end());
  }
  return order;
}

Lane::Lane(const Machines& machines, bool ring)
    : ring(ring), hosts(order_of(machines.count(), ring)), place(place_of(machines.machine())) {
  for (const int host : hosts) {
    ranks.push_back(machines.rank(host, machines.place()));
  }
}

int Lane::place_of(int host) const {
  return static_cast<int>(std::find(hosts.begin(), hosts.end(), host) - hosts.begin());
}

void scatter_between(Schedule& schedule, const Lane& lane, const Cut& slices) {
  (lane.ring ? ring::scatter : circulant::scatter)(schedule, lane.ranks, lane.place, kBetween, slices);
}

void gather_between(Schedule& schedule, const Lane& lane, const Cut& slices) {
  const int count = static_cast<int>(lane.ranks.size());
  const auto first = static_cast<uint16_t>(kBetween + (lane.ring ? count - 1 : circulant::messages(count)));
  (lane.ring ? ring::gather : circulant::gather)(schedule, lane.ranks, lane.place, first, slices);
}

} // namespace fog::two_level
