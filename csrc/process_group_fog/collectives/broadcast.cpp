#include "collectives/broadcast.hpp"

namespace fog {

Broadcast::Broadcast(Signature signature, void* data, size_t bytes)
    : Operation(signature), data_(static_cast<char*>(data)), bytes_(bytes) {}

void Broadcast::launch() {
  tree_ = host_tree(hosts(), signature_.root, bytes_ > Transport::kLocalInlineBytes);
  for (const auto& child : tree_.children) {
    expect_announcement(child.rank);
  }
  if (tree_.parent >= 0) {
    receive(tree_.parent, 0, data_, bytes_);
  }
}

Operation::Action Broadcast::advance() {
  if (!announced_ && announced()) {
    announced_ = true;
    if (tree_.parent >= 0) {
      announce_to(tree_.parent);
    }
  }
  if (!passed_on_ && received(0)) {
    passed_on_ = true;
    std::vector<Destination> children;
    for (const auto& child : tree_.children) {
      children.push_back({child.rank});
    }
    send(children, 0, data_, bytes_);
  }
  return received_all() ? Action::kDone : Action::kWait;
}

} // namespace fog
