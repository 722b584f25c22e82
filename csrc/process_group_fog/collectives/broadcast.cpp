#include "collectives/broadcast.hpp"

#include "collectives/slices.hpp"

namespace fog {
namespace {

constexpr size_t kTreeBytes = 64 * 1024;

} // namespace

Broadcast::Broadcast(Signature signature, void* data, size_t bytes)
    : Operation(signature), data_(static_cast<char*>(data)), bytes_(bytes) {}

// The rank `distance` places after the root.
int Broadcast::relative(int distance) const {
  return (signature_.root + distance) % size();
}

void Broadcast::launch() {
  if (one_host() && bytes_ > Transport::kLocalInlineBytes) {
    shape_ = Shape::kStar;
  } else {
    shape_ = bytes_ <= kTreeBytes || size() == 2 ? Shape::kTree : Shape::kSlices;
  }
  if (rank() != signature_.root) {
    announce_to(signature_.root);
  } else {
    for (int other = 1; other < size(); ++other) {
      expect_announcement(relative(other));
    }
  }
  if (shape_ == Shape::kSlices) {
    launch_slices();
    return;
  }
  const int distance = (rank() - signature_.root + size()) % size();
  if (distance == 0) {
    send_down();
    return;
  }
  receive(shape_ == Shape::kStar ? signature_.root : relative(distance & (distance - 1)), 0, data_, bytes_); // the parent
}

void Broadcast::send_down() {
  passed_on_ = true;
  const int distance = (rank() - signature_.root + size()) % size();
  if (shape_ == Shape::kStar) {
    if (distance == 0) {
      send(others(), 0, data_, bytes_);
    }
    return;
  }
  // A binomial tree: a rank's parent has its distance without the lowest bit.
  const int lowest = distance == 0 ? size() : distance & -distance;
  int farthest = 1;
  while (farthest < lowest && distance + farthest < size()) {
    farthest <<= 1;
  }
  for (int step = farthest; step >= 1; step >>= 1) { // the largest subtree first
    if (step < lowest && distance + step < size()) {
      send(relative(distance + step), 0, data_, bytes_);
    }
  }
}

void Broadcast::launch_slices() {
  const int parts = size() - 1;
  const int distance = (rank() - signature_.root + size()) % size();
  for (int other = 1; other < size(); ++other) {
    const auto slice = slice_of(bytes_, other - 1, parts);
    if (distance == 0) {
      send(relative(other), 0, data_ + slice.begin, slice.numel);
    } else if (other == distance) {
      receive(signature_.root, 0, data_ + slice.begin, slice.numel);
    } else {
      receive(relative(other), 1, data_ + slice.begin, slice.numel);
    }
  }
  passed_on_ = distance == 0;
}

Operation::Action Broadcast::advance() {
  if (!received(0)) {
    return Action::kWait;
  }
  if (!passed_on_) {
    if (shape_ != Shape::kSlices) {
      send_down();
    } else {
      passed_on_ = true;
      const int distance = (rank() - signature_.root + size()) % size();
      const auto slice = slice_of(bytes_, distance - 1, size() - 1);
      for (int other = 1; other < size(); ++other) {
        if (other != distance) {
          send(relative(other), 1, data_ + slice.begin, slice.numel);
        }
      }
    }
  }
  return received(1) && announced() ? Action::kDone : Action::kWait;
}

} // namespace fog
