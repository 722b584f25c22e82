#include "collectives/scatter.hpp"

#include "collectives/cutovers.hpp"
#include "core/copy.hpp"

namespace fog {

Scatter::Scatter(Signature signature, std::vector<Part> inputs, Part output)
    : Operation(signature), inputs_(std::move(inputs)), output_(output) {}

void Scatter::launch() {
  const int root = signature_.root;
  if (!cutovers::sent_on(output_.bytes, size(), hosts())) {
    if (rank() != root) {
      receive(root, 0, output_.data, output_.bytes);
      announce_to(root);
      return;
    }
    for (int distance = 1; distance < size(); ++distance) {
      const int peer = (root + distance) % size();
      send(peer, 0, inputs_[peer].data, inputs_[peer].bytes);
      expect_announcement(peer);
    }
    return;
  }
  tree_ = host_tree(hosts(), root);
  const auto bytes = static_cast<size_t>(tree_.end - tree_.begin) * output_.bytes;
  blocks_ = static_cast<char*>(scratch(bytes));
  for (const auto& child : tree_.children) {
    expect_announcement(child.rank);
  }
  if (rank() != root) {
    receive(tree_.parent, 0, blocks_, bytes);
    return;
  }
  char* block = blocks_;
  for (const int peer : host_order(hosts(), root)) {
    copy_bytes(block, inputs_[peer].data, output_.bytes);
    block += output_.bytes;
  }
}

Operation::Action Scatter::advance() {
  if (!announced_ && tree_.parent >= 0 && announced()) {
    announced_ = true;
    announce_to(tree_.parent);
  }
  if (blocks_ != nullptr && !passed_on_ && received(0)) {
    passed_on_ = true;
    for (const auto& child : tree_.children) {
      send(
          child.rank, 0, blocks_ + static_cast<size_t>(child.begin - tree_.begin) * output_.bytes,
          static_cast<size_t>(child.end - child.begin) * output_.bytes);
    }
  }
  if (!copied_ && (rank() == signature_.root || (blocks_ != nullptr && received(0)))) {
    copied_ = true;
    return Action::kCompute;
  }
  return received_all() ? Action::kDone : Action::kWait;
}

void Scatter::compute() {
  if (rank() == signature_.root) {
    copy_own(inputs_[rank()], output_);
  } else {
    copy_bytes(output_.data, blocks_, output_.bytes);
  }
}

} // namespace fog
