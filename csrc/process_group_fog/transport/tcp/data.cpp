#include "transport/tcp/data.hpp"

#include <algorithm>
#include <utility>

#include "transport/shared_memory/shared_tensors.hpp"

namespace fog::tcp {

IncomingData::IncomingData(const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner, Grant grant)
    : bytes_(header.bytes),
      place_(static_cast<char*>(place)),
      listener_(owner),
      owner_(place != nullptr ? owner : nullptr),
      grant_(std::move(grant)),
      capacity_(place != nullptr ? bytes_ : std::min(bytes_, kMemory)) {
  if (place == nullptr) {
    memory_ = shared_allocator().allocate(capacity_);
  }
}

void IncomingData::read(size_t from, size_t to, std::vector<Block>& blocks) const {
  const auto* memory = place_ != nullptr ? place_ : static_cast<const char*>(memory_.get());
  while (from < to) {
    const size_t at = from % capacity_;
    const size_t end = std::min(to, from - at + capacity_);
    blocks.push_back({from, end, memory + at});
    from = end;
  }
}

bool IncomingData::take(size_t bytes) {
  taken_ = bytes;
  grant_room();
  return !withdrawn_;
}

IncomingData::Room IncomingData::room() const {
  auto* memory = place_ != nullptr ? place_ : static_cast<char*>(memory_.get());
  const size_t at = come_ % capacity_;
  return {memory + at, std::min(granted_ - come_, capacity_ - at)};
}

void IncomingData::come(size_t bytes) {
  come_ += bytes;
}

void IncomingData::tell() const {
  if (const auto owner = listener_.lock()) {
    owner->on_progress();
  }
}

void IncomingData::grant_room() {
  const size_t room = std::min(bytes_, taken_ + capacity_);
  // in steps of a quarter, so that few messages say so
  if (!withdrawn_ && room > granted_ && (room == bytes_ || room - granted_ >= capacity_ / 4)) {
    granted_ = room;
    grant_(room);
  }
}

} // namespace fog::tcp
