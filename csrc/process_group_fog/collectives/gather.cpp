#include "collectives/gather.hpp"

#include "collectives/cutovers.hpp"
#include "core/copy.hpp"

namespace fog {

Gather::Gather(Signature signature, Part input, std::vector<Part> outputs)
    : Operation(signature), input_(input), outputs_(std::move(outputs)) {}

void Gather::launch() {
  const int root = signature_.root;
  if (!cutovers::sent_on(input_.bytes, size(), hosts())) {
    if (rank() != root) {
      send(root, 0, input_.data, input_.bytes);
      expect_announcement(root);
      return;
    }
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) {
        receive(peer, 0, outputs_[peer].data, outputs_[peer].bytes);
        announce_to(peer);
      }
    }
    return;
  }
  tree_ = host_tree(hosts(), root);
  blocks_ = static_cast<char*>(scratch(static_cast<size_t>(tree_.end - tree_.begin) * input_.bytes));
  copy_bytes(blocks_, input_.data, input_.bytes);
  for (const auto& child : tree_.children) {
    receive(
        child.rank, 0, blocks_ + static_cast<size_t>(child.begin - tree_.begin) * input_.bytes,
        static_cast<size_t>(child.end - child.begin) * input_.bytes);
  }
  if (tree_.parent >= 0) {
    expect_announcement(tree_.parent);
  }
}

Operation::Action Gather::advance() {
  if (!announced_ && announced()) {
    announced_ = true;
    for (const auto& child : tree_.children) {
      announce_to(child.rank);
    }
  }
  if (blocks_ != nullptr && tree_.parent >= 0 && !sent_ && received(0)) {
    sent_ = true;
    send(tree_.parent, 0, blocks_, static_cast<size_t>(tree_.end - tree_.begin) * input_.bytes);
  }
  if (rank() == signature_.root && !copied_ && (blocks_ == nullptr || received(0))) {
    copied_ = true;
    return Action::kCompute;
  }
  return received_all() ? Action::kDone : Action::kWait;
}

void Gather::compute() {
  copy_own(input_, outputs_[rank()]);
  if (blocks_ == nullptr) {
    return;
  }
  const auto order = host_order(hosts(), rank());
  for (int at = 1; at < size(); ++at) {
    const auto& output = outputs_[order[at]];
    copy_bytes(output.data, blocks_ + static_cast<size_t>(at) * input_.bytes, output.bytes);
  }
}

} // namespace fog
