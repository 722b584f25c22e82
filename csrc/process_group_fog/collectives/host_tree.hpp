// A tree over the ranks of a group, by which something goes from one of them to all others, or from all to one, in few steps.
#pragma once

#include <vector>

#include "core/machines.hpp"

namespace fog {

// Where one rank stands in the tree from a root: first from host to host, where one rank of each takes part, then within each host.
// Either is a binomial tree, of as many steps as its size has bits.
//
// In the tree's order a rank and all below it are neighbors: those from `begin` to `end`.
struct HostTree {
  struct Branch {
    int rank;
    int begin;
    int end;
  };
  int parent = -1; // none at the root
  std::vector<Branch> children; // the largest first
  int begin = 0;
  int end = 0;
};

// That of the rank whose `hosts` these are. With `star` the other ranks of a host are all children of the one that takes part between hosts.
HostTree host_tree(const Machines& hosts, int root, bool star = false);

// All ranks in the order of the tree: the root's host first, from the root on, then host by host.
std::vector<int> host_order(const Machines& hosts, int root);

} // namespace fog
