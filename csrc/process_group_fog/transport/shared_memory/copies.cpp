#include "transport/shared_memory/copies.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace fog::shared_memory {

class Copies::Out final : public TransferOwner {
 public:
  void on_progress() override {} // poll() checks instead

  // Returns true if data was copied.
  bool copy() {
    bool any = false;
    while (const auto fill = stream->next_fill()) {
      std::memcpy(fill->to, fill->from, fill->bytes);
      stream->filled(*fill);
      any = true;
    }
    return any;
  }

  PeerId peer = -1;
  uint64_t group = 0;
  std::shared_ptr<OutgoingStream> stream;
  std::shared_ptr<TransferOwner> owner; // owner of the memory
  std::function<void()> ended;
};

class Copies::In final : public TransferOwner, public Incoming {
 public:
  In(Copies& copies, PeerId source_of_it, void* place, size_t bytes, std::shared_ptr<TransferOwner> owner)
      : source(source_of_it), copies_(copies), place_(static_cast<char*>(place)), bytes_(bytes), owner_(std::move(owner)) {}

  size_t available() const override {
    return copied_;
  }
  void read(size_t from, size_t to, std::vector<Block>& blocks) const override {
    blocks.push_back({from, to, place_ + from});
  }
  bool take(size_t bytes) override {
    return true;
  }
  bool in_place() const override {
    return true;
  }
  void on_progress() override {
    if (stream_) { // otherwise begin() checks
      const auto kept = stream_;
      copy();
      owner_->on_progress();
    }
  }
  void begin(std::shared_ptr<Incoming> stream) {
    stream_ = std::move(stream);
    copy();
  }

  const PeerId source;

 private:
  // Copies the data that has arrived to its place.
  void copy() {
    const size_t end = stream_->available();
    if (end == copied_) {
      return;
    }
    std::vector<Block> blocks;
    stream_->read(copied_, end, blocks);
    for (const auto& block : blocks) {
      std::memcpy(place_ + block.begin, block.data, block.end - block.begin);
    }
    if (!stream_->take(end)) {
      error = "its sender has given it up";
    }
    copied_ = end;
    if (copied_ == bytes_) {
      const auto same = std::find_if(copies_.in_.begin(), copies_.in_.end(), [this](const auto& each) { return each.get() == this; });
      if (same != copies_.in_.end()) { // the caller holds this object
        copies_.released_.push_back(owner_);
        copies_.in_.erase(same);
      }
    }
  }

  Copies& copies_;
  char* const place_;
  const size_t bytes_;
  size_t copied_ = 0;
  std::shared_ptr<Incoming> stream_;
  const std::shared_ptr<TransferOwner> owner_;
};

Copies::Copies(Streams& streams, Links& links, std::vector<std::shared_ptr<TransferOwner>>& released)
    : streams_(streams), links_(links), released_(released) {}

Copies::~Copies() = default;

void Copies::send(
    PeerId peer, Header header, const void* data, const std::shared_ptr<TransferOwner>& owner, std::function<void()> ended) {
  auto out = std::make_shared<Out>();
  out->peer = peer;
  out->group = header.group;
  out->owner = owner;
  out->ended = std::move(ended);
  out_.push_back(out);
  out->stream = streams_.open({peer}, 0, data, header.bytes, out);
  streams_.announce(*out->stream, header);
  links_.send(peer, header, nullptr, 0);
  out->copy();
}

std::shared_ptr<Incoming> Copies::receive(
    PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner) {
  auto in = std::make_shared<In>(*this, source, place, header.bytes, owner);
  in_.insert(in);
  in->begin(streams_.receive(source, header, in));
  return in;
}

bool Copies::poll() {
  bool any = false;
  for (size_t i = 0; i < out_.size();) {
    const auto out = out_[i];
    any = out->copy() || any;
    if (!out->stream->sent_all() && !out->stream->closed()) {
      ++i;
      continue;
    }
    out_.erase(out_.begin() + static_cast<ptrdiff_t>(i));
    out->ended();
    released_.push_back(std::move(out->owner));
    any = true;
  }
  return any;
}

void Copies::forget(PeerId peer, uint64_t group) {
  for (const auto& out : out_) {
    if (out->peer == peer && (group == 0 || out->group == group)) {
      streams_.withdraw(*out);
    }
  }
  if (group != 0) {
    return;
  }
  for (auto in = in_.begin(); in != in_.end();) {
    in = (*in)->source == peer ? in_.erase(in) : std::next(in);
  }
}

} // namespace fog::shared_memory
