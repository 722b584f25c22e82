#include "collectives/allreduce.hpp"

#include "collectives/cutovers.hpp"
#include "collectives/schedules.hpp"
#include "collectives/two_level.hpp"

namespace fog {
namespace {

void between_hosts(Schedule& schedule, const Machines& hosts, const Cut& lanes, const cutovers::Path& path) {
  const two_level::Lane lane(hosts, path.ring);
  const auto all = lanes.part(hosts.place());
  if (!path.whole) {
    const auto slices = cut(all, hosts.count());
    two_level::scatter_between(schedule, lane, slices);
    two_level::gather_between(schedule, lane, slices);
  } else if (path.few_hosts) {
    direct::exchange(schedule, lane.ranks, lane.place, two_level::kBetween, all, Terms::kPartial);
  } else {
    tree::reduce(schedule, lane.ranks, lane.place, two_level::kBetween, all, Terms::kPartial, true);
    tree::spread(schedule, lane.ranks, lane.place, two_level::kBetween + 1, all);
  }
}

Schedule schedule_of(const Layout& layout, Slice all, const cutovers::Path& path, uint16_t first_message) {
  Schedule schedule{{}, first_message};
  if (path.direct) {
    direct::exchange(schedule, layout.ranks, layout.place, 0, all, Terms::kGiven);
    return schedule;
  }
  const auto& hosts = layout.hosts;
  const auto lanes = cut(all, path.lanes);
  const bool one_host = hosts.count() == 1;
  if (path.trees) {
    tree::reduce(schedule, hosts.local(), hosts.place(), two_level::kUp, all, Terms::kGiven, one_host);
  } else {
    two_level::scatter_in_host(schedule, hosts, lanes, one_host);
  }
  if (!one_host && hosts.place() < path.lanes) {
    between_hosts(schedule, hosts, lanes, path);
  }
  if (path.trees) {
    tree::spread(schedule, hosts.local(), hosts.place(), two_level::kDown, all);
  } else {
    two_level::gather_in_host(schedule, hosts, lanes);
  }
  return schedule;
}

std::vector<Schedule> schedules_of(const Layout& layout, size_t numel, size_t item) {
  const auto path = cutovers::of_allreduce(numel * item, layout);
  const int count = cutovers::parts(numel * item, layout, path);
  const auto parts = cut({0, numel}, count);
  std::vector<Schedule> schedules;
  for (int part = 0; part < count; ++part) {
    schedules.push_back(schedule_of(layout, parts.part(part), path, static_cast<uint16_t>(part * Schedule::kMessagesOfPart)));
  }
  return schedules;
}

} // namespace

Allreduce::Allreduce(const Terms& terms, void* data, size_t numel)
    : Reduction(terms, schedules_of(terms.layout, numel, c10::elementSize(terms.dtype))), data_(static_cast<char*>(data)) {}

} // namespace fog
