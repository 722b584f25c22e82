#include "transport/shared_memory/streams.hpp"

#include <algorithm>
#include <utility>

namespace fog::shared_memory {
namespace {

// Chunks that all readers share. The other chunks are for readers whose share is used up.
constexpr uint32_t kShared = 128;
constexpr size_t kLeastShare = 8;
constexpr size_t kExtraKept = 64; // free extra chunks that keep their pages
// Limits of how far a stream may be ahead of its fastest reader, and of its slowest reader before it goes on without
// that one.
constexpr size_t kAhead = size_t(1) << 20;
constexpr size_t kLag = size_t(4) << 20;

// Parts are small enough that both sides soon work at once, and large enough that their messages cost little.
size_t part_bytes(size_t bytes) {
  return std::clamp(bytes / 8 & ~size_t(63), size_t(32) << 10, Inbox::kChunkBytes);
}

} // namespace

Streams::Streams(Links& links) : links_(links) {
  free_.reserve(kShared); // giving chunks back must not fail
  free_extra_.reserve(Inbox::kChunks - kShared);
}

bool OutgoingStream::sent_all() const {
  return std::all_of(readers_.begin(), readers_.end(), [this](const Reader& reader) { return reader.sent == bytes_; });
}

bool OutgoingStream::sent_all(PeerId peer) const {
  return std::all_of(
      readers_.begin(), readers_.end(), [&](const Reader& reader) { return reader.peer != peer || reader.sent == bytes_; });
}

size_t OutgoingStream::sent() const {
  size_t sent = bytes_;
  for (const auto& reader : readers_) {
    sent = std::min(sent, reader.sent);
  }
  return sent;
}

std::optional<Outgoing::Fill> OutgoingStream::next_fill() {
  return streams_->next_fill(*this);
}

void OutgoingStream::filled(const Fill& fill) {
  streams_->filled(*this, fill);
}

// Data that this process reads from a peer's stream. It exists from the announcement on, even before an operation wants
// it.
class Streams::Reading final : public Incoming {
 public:
  Reading(Streams& streams, PeerId source, const Header& header)
      : bytes(header.bytes),
        transfer(header.shared.transfer),
        group(header.group),
        streams_(streams),
        source_(source),
        before_(header.shared.withdrawals),
        inbox_(streams.links_.shared_inbox_of(source)) {}

  size_t available() const override {
    return filled;
  }
  void read(size_t from, size_t to, std::vector<Block>& blocks) const override {
    for (const auto& chunk : chunks) {
      if (chunk.end > from && chunk.begin < to) {
        const size_t begin = std::max(chunk.begin, from);
        blocks.push_back({begin, std::min(chunk.end, to), chunk.data + (begin - chunk.begin)});
      }
    }
  }
  bool take(size_t bytes_taken) override {
    taken = bytes_taken;
    if (streams_.links_.shared_inbox_of(source_) != inbox_) { // another process has taken the sender's place
      return false;
    }
    const bool stands = streams_.links_.stands(source_, transfer, before_);
    while (!chunks.empty() && chunks.front().end <= taken) {
      chunks.pop_front();
    }
    streams_.say(source_, MessageKind::kEmptied, transfer, taken);
    if (taken == bytes) {
      streams_.reading_[source_].erase(transfer); // the caller holds this object
    }
    return stands;
  }

  const size_t bytes;
  const uint64_t transfer;
  const uint64_t group;
  size_t filled = 0;
  size_t taken = 0;
  bool wanted = false; // the sender has sent kWanted
  bool taking = false; // an operation receives it
  std::deque<Block> chunks;
  std::weak_ptr<TransferOwner> owner;

 private:
  Streams& streams_;
  const PeerId source_;
  const uint32_t before_;
  const std::shared_ptr<const Inbox> inbox_; // with the chunks
};

void Streams::say(PeerId peer, MessageKind kind, uint64_t transfer, size_t bytes, uint32_t chunk) {
  Header header;
  header.kind = kind;
  header.bytes = bytes;
  header.shared = {transfer, 0, 0, chunk};
  links_.send(peer, header, nullptr, 0);
}

// --- outgoing ---

std::shared_ptr<OutgoingStream> Streams::open(
    const std::vector<PeerId>& readers, uint64_t group, const void* data, size_t bytes, const std::shared_ptr<TransferOwner>& owner) {
  auto stream = std::make_shared<OutgoingStream>();
  stream->streams_ = this;
  stream->data_ = static_cast<const char*>(data);
  stream->bytes_ = bytes;
  stream->transfer_ = next_transfer();
  stream->group_ = group;
  stream->owner_ = owner;
  for (const PeerId peer : readers) {
    stream->readers_.push_back({peer});
    held_.emplace(peer, 0);
  }
  outgoing_.emplace(stream->transfer_, stream);
  return stream;
}

void Streams::announce(const OutgoingStream& stream, Header& header) const {
  header.delivery = Delivery::kStream;
  header.shared = {stream.transfer_, 0, links_.inbox().withdrawals(), 0};
}

size_t Streams::share() const {
  return std::max(kLeastShare, kShared / std::max<size_t>(1, static_cast<size_t>(links_.peers())));
}

std::optional<uint32_t> Streams::take_chunk(bool extra) {
  auto& free = extra ? free_extra_ : free_;
  if (!free.empty()) {
    const uint32_t chunk = free.back();
    free.pop_back();
    return chunk;
  }
  auto& touched = extra ? touched_extra_ : touched_;
  if (touched == (extra ? Inbox::kChunks - kShared : kShared)) {
    return std::nullopt;
  }
  return (extra ? kShared : 0) + touched++;
}

void Streams::give_chunk(OutgoingStream& stream, const OutgoingStream::Chunk& chunk) {
  for (const size_t reader : chunk.readers) {
    --held_[stream.readers_[reader].peer];
  }
  if (chunk.extra) {
    if (free_extra_.size() >= kExtraKept) {
      links_.inbox().drop(chunk.index);
    }
    free_extra_.push_back(chunk.index);
  } else {
    free_.push_back(chunk.index);
  }
}

std::vector<size_t> Streams::ready_at(const OutgoingStream& stream, size_t position, size_t bytes) const {
  std::vector<size_t> ready;
  size_t farthest = 0;
  for (size_t i = 0; i < stream.readers_.size(); ++i) {
    const auto& reader = stream.readers_[i];
    if (reader.sent != position || reader.taken > position || position + bytes - reader.taken > kLag) {
      continue;
    }
    const auto held = held_.find(reader.peer);
    if (held == held_.end() || held->second < (reader.takes ? share() : share() / 2)) {
      farthest = std::max(farthest, reader.taken);
      ready.push_back(i);
    }
  }
  if (position + bytes > farthest + kAhead) {
    ready.clear();
  }
  return ready;
}

std::optional<Outgoing::Fill> Streams::next_fill(OutgoingStream& stream) {
  if (stream.closed_ || stream.filling_) {
    return std::nullopt;
  }
  std::vector<size_t> positions; // the farthest first, so that slow readers do not delay others
  for (const auto& reader : stream.readers_) {
    if (reader.sent < stream.bytes_ && reader.taken <= reader.sent) { // otherwise it is gone
      positions.push_back(reader.sent);
    }
  }
  std::sort(positions.rbegin(), positions.rend());
  positions.erase(std::unique(positions.begin(), positions.end()), positions.end());
  for (const size_t position : positions) {
    const size_t bytes = std::min(part_bytes(stream.bytes_), stream.bytes_ - position);
    auto readers = ready_at(stream, position, bytes);
    auto index = readers.empty() ? std::nullopt : take_chunk(false);
    const bool extra = !index;
    if (extra) { // only for readers that have no other chunk of this stream to read
      readers.clear();
      std::vector<PeerId> idle;
      for (size_t i = 0; i < stream.readers_.size(); ++i) {
        auto& reader = stream.readers_[i];
        if (reader.sent != position || reader.taken != position) {
          continue;
        }
        idle.push_back(reader.peer);
        if (reader.takes) {
          readers.push_back(i);
        } else if (!std::exchange(reader.asked, true)) {
          say(reader.peer, MessageKind::kWanted, stream.transfer_, 0);
        }
      }
      index = readers.empty() ? std::nullopt : take_chunk(true);
      if (!index) {
        for (const PeerId peer : idle) {
          starving_.emplace(stream.transfer_, peer);
        }
        continue;
      }
    }
    for (const size_t reader : readers) {
      ++held_[stream.readers_[reader].peer];
    }
    stream.filling_ = OutgoingStream::Chunk{*index, position + bytes, extra, std::move(readers)};
    return Outgoing::Fill{links_.inbox().chunk(*index), stream.data_ + position, bytes};
  }
  return std::nullopt;
}

void Streams::filled(OutgoingStream& stream, const Outgoing::Fill& fill) {
  auto chunk = *std::exchange(stream.filling_, std::nullopt);
  if (stream.closed_) { // closed meanwhile
    give_chunk(stream, chunk);
    wake_starving();
    return;
  }
  std::vector<size_t> readers;
  bool gone = false;
  for (const size_t index : chunk.readers) {
    auto& reader = stream.readers_[index];
    if (reader.taken == stream.bytes_) { // it has gone meanwhile
      --held_[reader.peer];
      gone = true;
      continue;
    }
    reader.sent = chunk.end;
    readers.push_back(index);
    say(reader.peer, MessageKind::kFilled, stream.transfer_, chunk.end, chunk.index);
  }
  chunk.readers = std::move(readers);
  if (chunk.readers.empty()) {
    give_chunk(stream, chunk);
  } else {
    stream.chunks_.push_back(std::move(chunk));
  }
  if (gone) {
    wake_starving();
  }
}

void Streams::took(OutgoingStream& stream, size_t index, size_t taken) {
  auto& reader = stream.readers_[index];
  reader.takes = true;
  reader.taken = std::max(reader.taken, taken);
  bool freed = false;
  for (auto chunk = stream.chunks_.begin(); chunk != stream.chunks_.end();) {
    const auto found =
        chunk->end <= reader.taken ? std::find(chunk->readers.begin(), chunk->readers.end(), index) : chunk->readers.end();
    if (found != chunk->readers.end()) {
      chunk->readers.erase(found);
      --held_[reader.peer];
      freed = true;
    }
    if (chunk->readers.empty()) {
      give_chunk(stream, *chunk);
      chunk = stream.chunks_.erase(chunk);
    } else {
      ++chunk;
    }
  }
  if (freed) {
    wake_starving();
  }
  if (std::all_of(stream.readers_.begin(), stream.readers_.end(), [&](const auto& each) { return each.taken == stream.bytes_; })) {
    close(stream, false);
  } else if (const auto owner = stream.owner_.lock()) {
    owner->on_progress();
  }
}

void Streams::wake_starving() {
  // The oldest of each peer. If it gets no chunk it is added again, and the others have their turn later.
  std::unordered_set<PeerId> woken;
  for (auto position = starving_.begin(); position != starving_.end();) {
    const auto [transfer, peer] = *position;
    if (woken.count(peer) > 0) {
      ++position;
      continue;
    }
    const auto found = outgoing_.find(transfer);
    if (const auto owner = found == outgoing_.end() ? nullptr : found->second->owner_.lock()) {
      owner->on_progress();
      woken.insert(peer);
    }
    position = starving_.erase(position);
  }
}

void Streams::close(OutgoingStream& stream, bool withdrawn) {
  stream.closed_ = true;
  if (withdrawn) {
    links_.inbox().withdraw(stream.transfer_);
  }
  for (const auto& chunk : std::exchange(stream.chunks_, {})) {
    give_chunk(stream, chunk);
  }
  const auto owner = stream.owner_.lock();
  outgoing_.erase(stream.transfer_); // the remaining reference is the sender's, if any
  wake_starving();
  if (owner) {
    owner->on_progress();
  }
}

template <typename Which>
void Streams::close_all(Which&& which) {
  std::vector<std::shared_ptr<OutgoingStream>> streams;
  for (const auto& [transfer, stream] : outgoing_) {
    if (which(*stream)) {
      streams.push_back(stream);
    }
  }
  for (const auto& stream : streams) {
    close(*stream, true);
  }
}

void Streams::withdraw(const TransferOwner& owner) {
  close_all([&](const OutgoingStream& stream) { return stream.owner_.lock().get() == &owner; });
}

void Streams::withdraw_group(uint64_t group) {
  close_all([&](const OutgoingStream& stream) { return stream.group_ == group; });
  for (auto& [peer, readings] : reading_) {
    for (auto reading = readings.begin(); reading != readings.end();) {
      reading = reading->second->group == group ? readings.erase(reading) : std::next(reading);
    }
  }
}

void Streams::forget(PeerId peer, uint64_t group) {
  std::vector<std::shared_ptr<OutgoingStream>> streams;
  for (const auto& [transfer, stream] : outgoing_) {
    if (group == 0 || stream->group_ == group) {
      streams.push_back(stream);
    }
  }
  for (const auto& stream : streams) {
    for (size_t i = 0; i < stream->readers_.size(); ++i) {
      auto& reader = stream->readers_[i];
      if (reader.peer == peer && !stream->closed_) {
        if (group != 0) { // the peer wants no more data; a lost process has not received it
          reader.sent = stream->bytes_;
        }
        took(*stream, i, stream->bytes_);
      }
    }
  }
}

// --- incoming ---

void Streams::on_announcement(PeerId source, const Header& header) {
  reading_[source].emplace(header.shared.transfer, std::make_shared<Reading>(*this, source, header));
}

std::shared_ptr<Incoming> Streams::receive(PeerId source, const Header& header, const std::shared_ptr<TransferOwner>& owner) {
  const auto reading = reading_[source].at(header.shared.transfer);
  reading->owner = owner;
  reading->taking = true;
  if (reading->wanted) {
    say(source, MessageKind::kEmptied, header.shared.transfer, 0);
  }
  return reading;
}

void Streams::abandon(const TransferOwner& owner) {
  for (auto& [peer, readings] : reading_) {
    for (auto reading = readings.begin(); reading != readings.end();) {
      reading = reading->second->owner.lock().get() == &owner ? readings.erase(reading) : std::next(reading);
    }
  }
}

// --- messages of peers; those about unknown transfers come too late and are ignored ---

void Streams::on_filled(PeerId source, const Header& header) {
  const auto found = reading_[source].find(header.shared.transfer);
  if (found == reading_[source].end()) {
    return;
  }
  auto& reading = *found->second;
  if (header.bytes > reading.bytes || header.bytes <= reading.filled || header.bytes - reading.filled > Inbox::kChunkBytes) {
    refuse_message(source, sizeof(header), "a stream has more data than was announced");
  }
  reading.chunks.push_back({reading.filled, header.bytes, links_.inbox_of(source).chunk(header.shared.chunk)});
  reading.filled = header.bytes;
  if (const auto owner = reading.owner.lock()) {
    owner->on_progress();
  }
}

void Streams::on_emptied(PeerId source, const Header& header) {
  const auto found = outgoing_.find(header.shared.transfer);
  if (found == outgoing_.end()) {
    return;
  }
  const auto stream = found->second;
  for (size_t i = 0; i < stream->readers_.size(); ++i) {
    if (stream->readers_[i].peer == source) {
      if (header.bytes > stream->readers_[i].sent) {
        refuse_message(source, sizeof(header), "more of a stream was read than it has");
      }
      took(*stream, i, header.bytes);
      return;
    }
  }
}

void Streams::ignore(PeerId source, const Header& header) {
  reading_[source].erase(header.shared.transfer);
}

void Streams::on_wanted(PeerId source, const Header& header) {
  const auto found = reading_[source].find(header.shared.transfer);
  if (found == reading_[source].end()) {
    return;
  }
  found->second->wanted = true;
  if (found->second->taking) {
    say(source, MessageKind::kEmptied, header.shared.transfer, found->second->taken);
  }
}

} // namespace fog::shared_memory
