// A tree over the ranks of a group, to send data from one rank to all others, or from all to one, in few steps.
#pragma once

#include <vector>

#include "core/machines.hpp"

namespace fog {

// The position of a rank in the tree from a root. The tree first connects the hosts, with one rank of each, and then
// the ranks within each host. Both levels are binomial trees with a logarithmic number of steps.
//
// A rank and all ranks below it are contiguous in the tree's order: from `begin` to `end`.
struct HostTree {
  struct Branch {
    int rank;
    int begin;
    int end;
  };
  int parent = -1; // -1 at the root
  std::vector<Branch> children; // the largest first
  int begin = 0;
  int end = 0;
};

// Returns the position of the rank that `hosts` belongs to. With `star`, the other ranks of a host are all children of
// its rank that takes part between hosts.
HostTree host_tree(const Machines& hosts, int root, bool star = false);

// All ranks in the order of the tree: the root's host, beginning with the root, then host by host.
std::vector<int> host_order(const Machines& hosts, int root);

} // namespace fog
