#include "collectives/host_tree.hpp"

#include <algorithm>

namespace fog {
namespace {

// Adds what is around place `place` of `count` in a binomial tree from place 0. The parent of a place is without its lowest bit, and all
// below it are the places up to the next one with that bit. `starts[p]` is where place p begins in the order.
void add_binomial(HostTree& tree, int place, int count, const std::vector<int>& starts) {
  const int lowest = place == 0 ? count : place & -place;
  const auto end_of = [&](int at, int many) { return starts[std::min(at + many, count)]; };
  tree.end = std::max(tree.end, end_of(place, lowest));
  if (place > 0) {
    tree.parent = tree.order[starts[place & (place - 1)]];
  }
  int step = 1;
  while (step < lowest && place + step < count) {
    step <<= 1;
  }
  for (step >>= 1; step >= 1; step >>= 1) {
    tree.children.push_back({tree.order[starts[place + step]], starts[place + step], end_of(place + step, step)});
  }
}

} // namespace

HostTree host_tree(const Machines& hosts, int root, bool star) {
  HostTree tree;
  const int root_host = hosts.machine_of(root);
  std::vector<int> host_starts{0};
  for (int distance = 0; distance < hosts.count(); ++distance) {
    const auto& ranks = hosts.ranks((root_host + distance) % hosts.count());
    const auto first = distance == 0 ? std::find(ranks.begin(), ranks.end(), root) : ranks.begin();
    tree.order.insert(tree.order.end(), first, ranks.end());
    tree.order.insert(tree.order.end(), ranks.begin(), first);
    host_starts.push_back(static_cast<int>(tree.order.size()));
  }
  const int host = (hosts.machine() - root_host + hosts.count()) % hosts.count();
  const int start = host_starts[host];
  const int count = static_cast<int>(hosts.local().size());
  std::vector<int> local_starts;
  for (int place = 0; place <= count; ++place) {
    local_starts.push_back(start + place);
  }
  const int own = hosts.local()[hosts.place()];
  tree.begin = static_cast<int>(std::find(tree.order.begin() + start, tree.order.end(), own) - tree.order.begin());
  if (tree.begin == start) {
    add_binomial(tree, host, hosts.count(), host_starts);
  }
  if (!star) {
    add_binomial(tree, tree.begin - start, count, local_starts);
    return tree;
  }
  tree.end = std::max(tree.end, tree.begin + 1);
  if (tree.begin > start) {
    tree.parent = tree.order[start];
    return tree;
  }
  for (int at = start + 1; at < start + count; ++at) {
    tree.children.push_back({tree.order[at], at, at + 1});
  }
  return tree;
}

} // namespace fog
