#include "engine/early_messages.hpp"

namespace fog {
namespace {

constexpr size_t kMost = size_t(16) << 20; // per process

} // namespace

void EarlyLoad::add(int peer_id, size_t bytes) {
  const auto index = static_cast<size_t>(peer_id);
  if (index >= loads_.size()) {
    loads_.resize(index + 1, 0);
    held_.resize(index + 1, false);
  }
  bytes_ += bytes;
  loads_[index] += bytes;
  if (loads_[index] > kMost && !held_[index]) {
    changed_.insert(peer_id);
  }
}

void EarlyLoad::subtract(int peer_id, size_t bytes) {
  const auto index = static_cast<size_t>(peer_id);
  bytes_ -= bytes;
  loads_[index] -= bytes;
  if (held_[index] && loads_[index] <= kMost / 2) {
    changed_.insert(peer_id);
  }
}

std::vector<std::pair<int, bool>> EarlyLoad::take_changes() {
  std::vector<std::pair<int, bool>> changes;
  for (const int peer_id : std::exchange(changed_, {})) {
    const auto index = static_cast<size_t>(peer_id);
    const bool hold = held_[index] ? loads_[index] > kMost / 2 : loads_[index] > kMost;
    if (hold != held_[index]) {
      held_[index] = hold;
      changes.emplace_back(peer_id, hold);
    }
  }
  return changes;
}

EarlyMessage::EarlyMessage(EarlyLoad& load, int peer_id, int from, const Header& its_header, const char* its_data)
    : source(from),
      header(its_header),
      data(its_data, its_data + (its_data != nullptr ? its_header.bytes : 0)),
      load_(&load),
      peer_id_(peer_id) {
  load_->add(peer_id_, bytes());
}

EarlyMessage::EarlyMessage(EarlyMessage&& other) noexcept
    : source(other.source),
      header(other.header),
      data(std::move(other.data)),
      load_(std::exchange(other.load_, nullptr)),
      peer_id_(other.peer_id_) {}

EarlyMessage::~EarlyMessage() {
  if (load_ != nullptr) {
    load_->subtract(peer_id_, bytes());
  }
}

} // namespace fog
