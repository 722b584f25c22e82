#include "collectives/reduce.hpp"

#include <algorithm>

#include "collectives/cutovers.hpp"
#include "collectives/two_level.hpp"

namespace fog {
namespace {

constexpr uint16_t kToHost = 62; // to the root's host; above the numbers of all rounds between hosts
constexpr uint16_t kToRoot = two_level::kDown;

// The ranks of a host, beginning with the root if it is there.
std::vector<int> from_root(std::vector<int> ranks, int root) {
  const auto found = std::find(ranks.begin(), ranks.end(), root);
  if (found != ranks.end()) {
    std::rotate(ranks.begin(), found, ranks.end());
  }
  return ranks;
}

int place_of(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

void by_trees(Schedule& schedule, const Layout& layout, Slice all, int root) {
  const auto& hosts = layout.hosts;
  const int self = layout.ranks[layout.place];
  const auto local = from_root(hosts.local(), root);
  tree::reduce(schedule, local, place_of(local, self), two_level::kUp, all, Terms::kGiven, hosts.count() == 1);
  if (hosts.count() > 1 && local[0] == self) {
    std::vector<int> leaders;
    const int first = hosts.machine_of(root);
    for (int host = 0; host < hosts.count(); ++host) {
      leaders.push_back(host == first ? root : hosts.rank(host, 0));
    }
    leaders = from_root(std::move(leaders), root);
    tree::reduce(schedule, leaders, place_of(leaders, self), two_level::kBetween, all, Terms::kPartial, true);
  }
}

void by_slices(Schedule& schedule, const Layout& layout, Slice all, int root, const cutovers::Path& path) {
  const auto& hosts = layout.hosts;
  const int self = layout.ranks[layout.place];
  const int home = hosts.machine_of(root);
  const auto lanes = cut(all, path.lanes);
  two_level::scatter_in_host(schedule, hosts, lanes, hosts.count() == 1);
  if (hosts.count() > 1 && hosts.place() < path.lanes) {
    const two_level::Lane lane(hosts, path.ring);
    const auto slices = cut(lanes.part(hosts.place()), hosts.count());
    two_level::scatter_between(schedule, lane, slices);
    const int destination = lane.place_of(home);
    if (lane.place != destination) {
      schedule.send({lane.ranks[destination]}, kToHost, slices.part(lane.place));
    } else {
      for (int place = 0; place < hosts.count(); ++place) {
        if (place != destination) {
          schedule.await(lane.ranks[place], kToHost, slices.part(place));
        }
      }
    }
  }
  if (hosts.machine() != home) {
    return;
  }
  if (self != root && hosts.place() < path.lanes) {
    schedule.send({root}, kToRoot, lanes.part(hosts.place()));
  }
  for (int lane = 0; self == root && lane < path.lanes; ++lane) {
    if (hosts.local()[lane] != root) {
      schedule.await(hosts.local()[lane], kToRoot, lanes.part(lane));
    }
  }
}

Schedule schedule_of(const Layout& layout, size_t numel, size_t item, int root) {
  const Slice all{0, numel};
  const auto path = cutovers::of_reduce(numel * item, layout);
  Schedule schedule;
  if (path.direct) {
    if (layout.ranks[layout.place] == root) {
      schedule.combine(layout.ranks, 0, all, true, true);
    } else {
      schedule.send({root}, 0, all, true);
    }
  } else if (path.trees) {
    by_trees(schedule, layout, all, root);
  } else {
    by_slices(schedule, layout, all, root, path);
  }
  return schedule;
}

} // namespace

Reduce::Reduce(const Terms& terms, void* data, size_t numel)
    : Reduction(terms, {schedule_of(terms.layout, numel, c10::elementSize(terms.dtype), terms.signature.root)}),
      data_(static_cast<char*>(data)) {}

void Reduce::launch() {
  sums_ = data_;
  if (rank() != signature_.root) {
    const auto sums = changed();
    first_ = sums.begin;
    sums_ = static_cast<char*>(scratch(sums.numel * item()));
  }
  Reduction::launch();
}

tree::Family Reduce::family() const {
  return tree::family_of((rank() - signature_.root + size()) % size(), size());
}

void Reduce::announce() {
  const int parent = family().parent;
  if (parent >= 0) {
    expect_announcement(from_root(parent));
  }
}

Operation::Action Reduce::advance() {
  if (!told_ && announced()) {
    told_ = true;
    for (const int child : family().children) {
      announce_to(from_root(child));
    }
  }
  return Reduction::advance();
}

} // namespace fog
