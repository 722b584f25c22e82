#pragma once

#include "collectives/slices.hpp"
#include "collectives/host_tree.hpp"
#include "engine/operation.hpp"

namespace fog {

// Every rank gets the root's tensor.
//
// Small tensors go down a tree, from host to host first. On one host every rank reads a larger one from the root's memory. To other hosts
// it goes in slices, one for each place that all hosts have, so that all ranks of a host bring a part of it: the root sends each other host a
// different piece of each slice, ranks with the same place pass their pieces on to each other, and then share the slices within their host.
// So a link carries the tensor once (scatter, then allgather; M. Barnett et al., "Building a high-performance collective communication
// library", SC 1994, doi:10.1109/SUPERC.1994.344261).
class Broadcast : public Operation {
 public:
  Broadcast(Signature signature, void* data, size_t bytes);

 protected:
  void launch() override;
  Action advance() override;

 private:
  // What a rank does with slices.
  enum class Role {
    kTree, // there are none: the tensor goes down the tree
    kRoot,
    kBesideRoot, // on its host
    kPlace, // takes part between hosts
    kLocal, // has a place there that not all hosts have
  };
  // Messages.
  enum Step : uint16_t { kDown, kAcross, kShared };

  void launch_slices();
  void advance_place();
  // The hosts that are neither this rank's nor the root's.
  std::vector<int> hosts_across() const;
  // In bytes: slice `place`, and the piece of it that the root sends to `host`.
  Slice slice(int place) const;
  Slice piece(int place, int host) const;

  char* const data_;
  const size_t bytes_;
  Role role_ = Role::kTree;
  HostTree tree_;
  HostTree announcements_; // where they are confirmed
  bool announced_ = false; // to the parent there, that all below have come
  bool passed_on_ = false; // down the tree, or across
  bool shared_ = false; // within the host
};

} // namespace fog
