#pragma once

#include "collectives/host_tree.hpp"
#include "engine/operation.hpp"

namespace fog {

// Every rank gets the root's tensor.
//
// Tensors go down a tree, first from host to host. On one host, every rank reads larger tensors from the memory of the
// first one.
class Broadcast : public Operation {
 public:
  Broadcast(Signature signature, void* data, size_t bytes);

 protected:
  void launch() override;
  Action advance() override;

 private:
  char* const data_;
  const size_t bytes_;
  HostTree tree_;
  bool announced_ = false; // to the parent, that all ranks below have come
  bool passed_on_ = false; // down the tree
};

} // namespace fog
