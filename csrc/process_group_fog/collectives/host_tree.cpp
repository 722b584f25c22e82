#include "collectives/host_tree.hpp"

#include <algorithm>

namespace fog {
namespace {

// Adds what is around place `place` of `count` in a binomial tree from place 0. The parent of a place is without its lowest bit.
template <typename RankAt>
void add_binomial(HostTree& tree, int place, int count, const RankAt& rank_at) {
  const int lowest = place == 0 ? count : place & -place;
  if (place > 0) {
    tree.parent = rank_at(place & (place - 1));
  }
  int step = 1;
  while (step < lowest && place + step < count) {
    step <<= 1;
  }
  for (step >>= 1; step >= 1; step >>= 1) {
    tree.children.push_back(rank_at(place + step));
  }
}

} // namespace

HostTree host_tree(const Machines& hosts, int root, bool star) {
  HostTree tree;
  const int root_host = hosts.machine_of(root);
  const auto& local = hosts.local();
  const int local_count = static_cast<int>(local.size());
  // The rank of a host that takes part between hosts, and the others from there on.
  const int first = hosts.machine() == root_host ? static_cast<int>(std::find(local.begin(), local.end(), root) - local.begin()) : 0;
  const int place = (hosts.place() - first + local_count) % local_count;
  const auto local_at = [&](int at) { return local[(first + at) % local_count]; };
  if (place == 0) {
    const int host = (hosts.machine() - root_host + hosts.count()) % hosts.count();
    add_binomial(tree, host, hosts.count(), [&](int at) { return at == 0 ? root : hosts.rank((root_host + at) % hosts.count(), 0); });
  }
  if (!star) {
    add_binomial(tree, place, local_count, local_at);
  } else if (place > 0) {
    tree.parent = local_at(0);
  } else {
    for (int at = 1; at < local_count; ++at) {
      tree.children.push_back(local_at(at));
    }
  }
  return tree;
}

} // namespace fog
