#include "collectives/host_tree.hpp"

#include <algorithm>

namespace fog {
namespace {

// The ranks in the order of the tree: by host, beginning with the root's, and by place, beginning on the root's host
// with the root.
class Order {
 public:
  Order(const Machines& hosts, int root) : hosts_(hosts), root_host_(hosts.machine_of(root)), root_place_(hosts.place_of(root)) {}

  int distance_of(int host) const {
    return (host - root_host_ + hosts_.count()) % hosts_.count();
  }
  const std::vector<int>& ranks(int distance) const {
    return hosts_.ranks((root_host_ + distance) % hosts_.count());
  }
  int rank(int distance, int at) const {
    const auto& local = ranks(distance);
    const auto place = static_cast<size_t>(at + first_place(distance));
    return local[place < local.size() ? place : place - local.size()];
  }
  // The position in the order, within its host, of the rank with this place.
  int position(int distance, int place) const {
    const int count = static_cast<int>(ranks(distance).size());
    return (place - first_place(distance) + count) % count;
  }
  // For each host the number of ranks before it, and at the end the number of all ranks.
  std::vector<int> starts() const {
    std::vector<int> starts{0};
    starts.reserve(static_cast<size_t>(hosts_.count()) + 1);
    for (int distance = 0; distance < hosts_.count(); ++distance) {
      starts.push_back(starts.back() + static_cast<int>(ranks(distance).size()));
    }
    return starts;
  }

 private:
  int first_place(int distance) const {
    return distance == 0 ? root_place_ : 0;
  }

  const Machines& hosts_;
  const int root_host_;
  const int root_place_;
};

// Adds the parent and the children of place `place` of `count` in a binomial tree from place 0. The parent's place
// lacks the lowest set bit of `place`; the places below `place` reach up to the next one with that bit. Place p begins
// at `start_of(p)` in the order and has rank `rank_at(p)`.
template <typename RankAt, typename StartOf>
void add_binomial(HostTree& tree, int place, int count, RankAt&& rank_at, StartOf&& start_of) {
  const int lowest = place == 0 ? count : place & -place;
  const auto end_of = [&](int at, int many) { return start_of(std::min(at + many, count)); };
  tree.end = std::max(tree.end, end_of(place, lowest));
  if (place > 0) {
    tree.parent = rank_at(place & (place - 1));
  }
  int step = 1;
  while (step < lowest && place + step < count) {
    step <<= 1;
  }
  for (step >>= 1; step >= 1; step >>= 1) {
    tree.children.push_back({rank_at(place + step), start_of(place + step), end_of(place + step, step)});
  }
}

} // namespace

HostTree host_tree(const Machines& hosts, int root, bool star) {
  HostTree tree;
  const Order order(hosts, root);
  const auto starts = order.starts();
  const int distance = order.distance_of(hosts.machine());
  const int start = starts[distance];
  const int position = order.position(distance, hosts.place());
  const int count = static_cast<int>(hosts.local().size());
  tree.begin = start + position;
  if (position == 0) {
    add_binomial(tree, distance, hosts.count(), [&](int host) { return order.rank(host, 0); }, [&](int host) { return starts[host]; });
  }
  if (!star) {
    add_binomial(tree, position, count, [&](int at) { return order.rank(distance, at); }, [&](int at) { return start + at; });
    return tree;
  }
  tree.end = std::max(tree.end, tree.begin + 1);
  if (position > 0) {
    tree.parent = order.rank(distance, 0);
    return tree;
  }
  for (int at = 1; at < count; ++at) {
    tree.children.push_back({order.rank(distance, at), start + at, start + at + 1});
  }
  return tree;
}

std::vector<int> host_order(const Machines& hosts, int root) {
  const Order order(hosts, root);
  std::vector<int> ranks;
  for (int distance = 0; distance < hosts.count(); ++distance) {
    for (int at = 0; at < static_cast<int>(order.ranks(distance).size()); ++at) {
      ranks.push_back(order.rank(distance, at));
    }
  }
  return ranks;
}

} // namespace fog
