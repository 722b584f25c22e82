#pragma once

#include "collectives/schedule.hpp"
#include "collectives/host_tree.hpp"
#include "engine/operation.hpp"

namespace fog {

// Every rank gets the root's tensor.
//
// Small tensors go down a tree, first from host to host. On one host, every rank reads larger tensors from the root's
// memory. To other hosts, a larger tensor goes in slices, one for each place that all hosts have, so that all ranks of
// a host carry a part of it. The root sends a different piece of each slice to each other host, ranks with the same
// place pass their pieces on to each other, and then share the slices within their host. So a link carries the tensor
// once (scatter, then allgather; M. Barnett et al., "Building a high-performance collective communication library", SC
// 1994, doi:10.1109/SUPERC.1994.344261).
class Broadcast : public Operation {
 public:
  Broadcast(Signature signature, void* data, size_t bytes);

 protected:
  void launch() override;
  Action advance() override;

 private:
  // The role of a rank in a broadcast by slices.
  enum class Role {
    kTree, // no slices: the tensor goes down the tree
    kRoot,
    kBesideRoot, // on the root's host
    kPlace, // takes part between hosts
    kLocal, // has a place that not all hosts have
  };
  // Message numbers.
  enum Step : uint16_t { kDown, kAcross, kShared };

  void launch_slices();
  void advance_place();
  // All hosts except this rank's and the root's.
  std::vector<int> hosts_across() const;
  // In bytes: slice `place`, and the piece of it that the root sends to `host`.
  Slice slice(int place) const;
  Slice piece(int place, int host) const;

  char* const data_;
  const size_t bytes_;
  Role role_ = Role::kTree;
  HostTree tree_;
  HostTree announcements_; // the tree for announcements, if sends are confirmed
  bool announced_ = false; // to the parent, that all ranks below have come
  bool passed_on_ = false; // down the tree, or to the other hosts
  bool shared_ = false; // within the host
};

} // namespace fog
