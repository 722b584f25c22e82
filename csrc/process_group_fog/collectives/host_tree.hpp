// A tree over the ranks of a group, by which something goes from one of them to all others in few steps.
#pragma once

#include <vector>

#include "core/machines.hpp"

namespace fog {

struct HostTree {
  int parent = -1; // none at the root
  std::vector<int> children; // the one with the largest subtree first
};

// Where the rank of `hosts` stands in the tree from `root`: first from host to host, where one rank of each takes
// part, then within each host. Either is a binomial tree, of as many steps as its size has bits. With `star` all ranks of a host are
// children of the one that took part.
HostTree host_tree(const Machines& hosts, int root, bool star = false);

} // namespace fog
