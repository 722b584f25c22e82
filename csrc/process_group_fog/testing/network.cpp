#include "testing/network.hpp"

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <utility>

namespace fog {
namespace {

constexpr size_t kChunkBytes = size_t(16) << 10;
constexpr size_t kChunksAhead = 4;

} // namespace

InProcessNetwork::InProcessNetwork(int size, Options options)
    : size_(size), options_(options), random_(options.seed), boxes_(static_cast<size_t>(size)), looks_(static_cast<size_t>(size), 0) {
  counts_.failures_told.resize(static_cast<size_t>(size), 0);
}

void InProcessNetwork::put(PeerId from, PeerId to, Parcel parcel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  counts_.failures_told[static_cast<size_t>(from)] += parcel.header.kind == MessageKind::kError ? 1 : 0;
  if (lost_.count(from) > 0 || lost_.count(to) > 0) {
    return;
  }
  auto& box = boxes_[static_cast<size_t>(to)][from];
  parcel.due = looks_[static_cast<size_t>(to)] + (options_.most_delay > 0 ? random_() % (options_.most_delay + 1) : 0);
  if (!box.empty()) {
    parcel.due = std::max(parcel.due, box.back().due);
  }
  parcel.number = parcels_++;
  if (is_in_order(parcel.header)) {
    auto& sent = counts_.sent[{from, to}];
    sent = {sent.first + 1, sent.second + parcel.header.bytes};
  }
  box.push_back(std::move(parcel));
  ++in_flight_;
}

std::vector<std::pair<PeerId, InProcessNetwork::Parcel>> InProcessNetwork::take(PeerId to) {
  std::vector<std::pair<PeerId, Parcel>> taken;
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t look = looks_[static_cast<size_t>(to)]++;
  auto& boxes = boxes_[static_cast<size_t>(to)];
  for (auto box = boxes.begin(); box != boxes.end();) {
    auto& [from, parcels] = *box;
    while (!parcels.empty() && parcels.front().due <= look) {
      taken.emplace_back(from, std::move(parcels.front()));
      parcels.pop_front();
      --in_flight_;
    }
    box = parcels.empty() ? boxes.erase(box) : std::next(box);
  }
  if (options_.most_delay > 0) { // shuffle, but keep the order of each sender
    std::shuffle(taken.begin(), taken.end(), random_);
    std::map<PeerId, std::deque<Parcel>> in_order;
    std::vector<PeerId> order;
    for (auto& [from, parcel] : taken) {
      order.push_back(from);
      in_order[from].push_back(std::move(parcel));
    }
    for (auto& [from, parcels] : in_order) {
      std::sort(parcels.begin(), parcels.end(), [](const Parcel& one, const Parcel& other) { return one.number < other.number; });
    }
    for (size_t i = 0; i < taken.size(); ++i) {
      taken[i] = {order[i], std::move(in_order[order[i]].front())};
      in_order[order[i]].pop_front();
    }
  }
  return taken;
}

class InProcessNetwork::Endpoint final : public Transport {
 public:
  Endpoint(std::shared_ptr<InProcessNetwork> network, PeerId self, MessageHandler& handler)
      : network_(std::move(network)), self_(self), handler_(handler) {}

  std::string address() const override {
    return {};
  }
  void attach(PeerId peer, int pid, const std::string& address) override {}
  bool shares_memory(PeerId peer) const override {
    return false; // windows go by messages
  }
  std::vector<PeerId> spoken_with() const override;
  bool has_spoken_with(PeerId peer) const override {
    return true;
  }
  std::vector<Ended> ended() override;
  void forget(PeerId peer) override {
    forget(peer, 0);
  }
  void forget(PeerId peer, uint64_t group) override;

  using Transport::send;
  Sent send(
      c10::ArrayRef<Destination> destinations,
      const Header& header,
      const void* data,
      Memory memory,
      const std::shared_ptr<TransferOwner>& owner) override;
  std::shared_ptr<Incoming> receive(
      PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner) override;
  void hold_back(PeerId peer, bool hold) override {
    if (hold) {
      held_.insert(peer);
    } else {
      held_.erase(peer);
    }
  }
  void withdraw(const TransferOwner& owner) override;
  void withdraw_group(uint64_t group) override;
  void ignore(PeerId source, const Header& header) override {
    coming_.erase(header.shared.transfer);
  }

  bool poll() override;
  bool must_poll() override {
    return true; // the doorbell is not rung
  }
  bool sending() const override {
    return !going_.empty();
  }
  bool give_up() override {
    return false;
  }
  std::vector<std::shared_ptr<TransferOwner>> take_released() override {
    return std::exchange(released_, {});
  }
  Doorbell& bell() override {
    return bell_;
  }
  bool news() const override {
    return false;
  }
  bool waiting_for_space() const override {
    return false;
  }

 private:
  class Going;
  class Coming;

  void say(PeerId peer, MessageKind kind, uint64_t transfer, size_t bytes, std::shared_ptr<std::vector<char>> data = nullptr);
  void on_taken(PeerId source, const Header& header);
  template <typename Which>
  void drop(Which&& which);
  bool stands(uint64_t transfer) const {
    const std::lock_guard<std::mutex> lock(network_->mutex_);
    return network_->valid_.count(transfer) > 0;
  }

  const std::shared_ptr<InProcessNetwork> network_;
  const PeerId self_;
  MessageHandler& handler_;
  Doorbell bell_ = {};
  std::map<uint64_t, std::shared_ptr<Going>> going_; // by transfer
  std::map<uint64_t, std::shared_ptr<Coming>> coming_; // by the sender's transfer, unique in the network
  std::set<PeerId> held_;
  std::set<PeerId> seen_lost_;
  std::vector<std::shared_ptr<TransferOwner>> released_;
  bool by_turns_ = false;
};

// Data on its way to several receivers.
class InProcessNetwork::Endpoint::Going final : public Outgoing {
 public:
  struct Reader {
    PeerId peer;
    size_t taken = 0;
  };

  bool done() const override {
    return std::all_of(readers.begin(), readers.end(), [this](const Reader& reader) { return is_done(reader); });
  }
  bool done(PeerId peer) const override {
    return std::all_of(readers.begin(), readers.end(), [&](const Reader& reader) { return reader.peer != peer || is_done(reader); });
  }
  size_t sent() const override {
    return chunked ? filled_ : bytes;
  }
  std::optional<Fill> next_fill() override {
    if (!chunked || filling_ || filled_ == bytes || filled_ >= slowest() + kChunksAhead * kChunkBytes) {
      return std::nullopt;
    }
    const size_t part = std::min(kChunkBytes, bytes - filled_);
    filling_ = std::make_shared<std::vector<char>>(part);
    return Fill{filling_->data(), data + filled_, part};
  }
  void filled(const Fill& fill) override {
    const auto chunk = std::exchange(filling_, nullptr);
    filled_ += fill.bytes;
    for (const auto& reader : readers) {
      endpoint->say(reader.peer, MessageKind::kFilled, transfer, filled_, chunk);
    }
  }
  size_t slowest() const {
    size_t taken = bytes;
    for (const auto& reader : readers) {
      taken = std::min(taken, reader.taken);
    }
    return taken;
  }

  Endpoint* endpoint = nullptr;
  uint64_t transfer = 0;
  uint64_t group = 0;
  const char* data = nullptr;
  size_t bytes = 0;
  bool chunked = false;
  std::vector<char> copy; // of data that may change
  std::vector<Reader> readers;
  std::shared_ptr<TransferOwner> owner;

 private:
  bool is_done(const Reader& reader) const {
    return reader.taken == bytes || (chunked && filled_ == bytes);
  }

  size_t filled_ = 0;
  std::shared_ptr<std::vector<char>> filling_;
};

// Data on its way here: in the sender's memory, or in chunks.
class InProcessNetwork::Endpoint::Coming final : public Incoming {
 public:
  size_t available() const override {
    return available_bytes;
  }
  void read(size_t from, size_t to, std::vector<Block>& blocks) const override {
    for (const auto& chunk : chunks) {
      if (chunk.first.end > from && chunk.first.begin < to) {
        const size_t begin = std::max(chunk.first.begin, from);
        blocks.push_back({begin, std::min(chunk.first.end, to), chunk.first.data + (begin - chunk.first.begin)});
      }
    }
  }
  bool take(size_t bytes) override {
    while (!chunks.empty() && chunks.front().first.end <= bytes) {
      chunks.pop_front();
    }
    const bool stood = endpoint->stands(transfer);
    endpoint->say(source, MessageKind::kEmptied, transfer, bytes);
    if (bytes == total) {
      endpoint->coming_.erase(transfer);
    }
    return stood;
  }

  Endpoint* endpoint = nullptr;
  PeerId source = -1;
  uint64_t transfer = 0;
  uint64_t group = 0;
  size_t total = 0;
  size_t available_bytes = 0;
  std::deque<std::pair<Block, std::shared_ptr<std::vector<char>>>> chunks;
  std::weak_ptr<TransferOwner> owner;
};

std::vector<PeerId> InProcessNetwork::Endpoint::spoken_with() const {
  std::vector<PeerId> peers(static_cast<size_t>(network_->size_));
  std::iota(peers.begin(), peers.end(), 0);
  peers.erase(peers.begin() + self_);
  return peers;
}

std::vector<Transport::Ended> InProcessNetwork::Endpoint::ended() {
  std::vector<Ended> ended;
  const std::lock_guard<std::mutex> lock(network_->mutex_);
  for (const PeerId peer : network_->noticed_) {
    if (peer != self_ && seen_lost_.insert(peer).second) {
      ended.push_back({peer, Peer::State::kLost, kLost});
    }
  }
  return ended;
}

void InProcessNetwork::Endpoint::say(
    PeerId peer, MessageKind kind, uint64_t transfer, size_t bytes, std::shared_ptr<std::vector<char>> data) {
  Parcel parcel;
  parcel.header.kind = kind;
  parcel.header.shared.transfer = transfer;
  parcel.header.bytes = bytes;
  parcel.data = std::move(data);
  network_->put(self_, peer, std::move(parcel));
}

Transport::Sent InProcessNetwork::Endpoint::send(
    c10::ArrayRef<Destination> destinations,
    const Header& message,
    const void* data,
    Memory memory,
    const std::shared_ptr<TransferOwner>& owner) {
  auto header = message;
  const auto* bytes = static_cast<const char*>(data);
  std::shared_ptr<Going> going;
  const bool chunked = memory == Memory::kOverwritten || (memory == Memory::kStays && (by_turns_ = !by_turns_));
  for (const auto& [peer, scale, wants_confirm, only_sender] : destinations) {
    if (handler_.peers()[peer].is_lost()) {
      throw Unreachable(peer);
    }
    header.scale = scale;
    header.wants_confirm = wants_confirm ? 1 : 0;
    const bool in_order = header.kind == MessageKind::kData || header.kind == MessageKind::kPointToPoint;
    const bool small = header.bytes <= kInlineBytes || memory == Memory::kMessages;
    if (small && !(in_order && header.bytes > 0 && held_.count(peer) > 0)) {
      header.delivery = Delivery::kInline;
      Parcel parcel{header, nullptr};
      if (header.bytes > 0) {
        parcel.data = std::make_shared<std::vector<char>>(bytes, bytes + header.bytes);
      }
      network_->put(self_, peer, std::move(parcel));
      continue;
    }
    if (!going) {
      going = std::make_shared<Going>();
      going->endpoint = this;
      going->group = header.group;
      going->bytes = header.bytes;
      going->chunked = chunked;
      if (header.bytes <= kInlineBytes) { // it may change as soon as this returns
        going->copy.assign(bytes, bytes + header.bytes);
      }
      going->data = going->copy.empty() ? bytes : going->copy.data();
      const std::lock_guard<std::mutex> lock(network_->mutex_);
      going->transfer = network_->next_transfer_++;
      network_->valid_.insert(going->transfer);
    }
    going->readers.push_back({peer, 0});
    header.delivery = chunked ? Delivery::kStream : Delivery::kMapped;
    header.shared = {going->transfer, reinterpret_cast<uintptr_t>(going->data), 0, 0};
    network_->put(self_, peer, {header, nullptr});
  }
  if (going) {
    going->owner = owner;
    going_.emplace(going->transfer, going);
  }
  return {going, {}};
}

std::shared_ptr<Incoming> InProcessNetwork::Endpoint::receive(
    PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner) {
  auto coming = coming_.at(header.shared.transfer);
  coming->owner = owner;
  return coming;
}

void InProcessNetwork::Endpoint::on_taken(PeerId source, const Header& header) {
  const auto found = going_.find(header.shared.transfer);
  if (found == going_.end()) {
    return; // it was withdrawn
  }
  const auto going = found->second;
  for (auto& reader : going->readers) {
    if (reader.peer == source) {
      reader.taken = std::max<size_t>(reader.taken, header.bytes);
    }
  }
  const auto owner = going->owner;
  if (going->slowest() == going->bytes) {
    {
      const std::lock_guard<std::mutex> lock(network_->mutex_);
      network_->valid_.erase(header.shared.transfer);
    }
    going_.erase(found);
    released_.push_back(std::move(going->owner));
  }
  if (owner) {
    owner->on_progress();
    released_.push_back(owner); // must not be released under the lock
  }
}

bool InProcessNetwork::Endpoint::poll() {
  {
    const std::lock_guard<std::mutex> lock(network_->mutex_);
    if (network_->lost_.count(self_) > 0) {
      return false;
    }
  }
  const auto parcels = network_->take(self_);
  for (const auto& [source, parcel] : parcels) {
    const auto& header = parcel.header;
    if (header.kind == MessageKind::kEmptied) {
      on_taken(source, header);
      continue;
    }
    if (header.kind == MessageKind::kFilled) {
      if (const auto found = coming_.find(header.shared.transfer); found != coming_.end()) {
        auto& coming = *found->second;
        coming.chunks.push_back({{coming.available_bytes, header.bytes, parcel.data->data()}, parcel.data});
        coming.available_bytes = header.bytes;
        if (const auto owner = coming.owner.lock()) {
          owner->on_progress();
        }
      }
      continue;
    }
    if (header.delivery != Delivery::kInline) {
      auto coming = std::make_shared<Coming>();
      coming->endpoint = this;
      coming->source = source;
      coming->group = header.group;
      coming->total = header.bytes;
      coming->transfer = header.shared.transfer;
      if (header.delivery == Delivery::kMapped) {
        coming->available_bytes = header.bytes;
        coming->chunks.push_back({{0, header.bytes, reinterpret_cast<const char*>(header.shared.address)}, nullptr});
      }
      coming_.emplace(header.shared.transfer, coming);
    }
    handler_.on_message(source, header, header.delivery == Delivery::kInline && parcel.data ? parcel.data->data() : nullptr);
  }
  return !parcels.empty();
}

template <typename Which>
void InProcessNetwork::Endpoint::drop(Which&& which) {
  for (auto position = going_.begin(); position != going_.end();) {
    if (which(*position->second)) {
      const std::lock_guard<std::mutex> lock(network_->mutex_);
      network_->valid_.erase(position->first);
      released_.push_back(std::move(position->second->owner));
      position = going_.erase(position);
    } else {
      ++position;
    }
  }
}

void InProcessNetwork::Endpoint::withdraw(const TransferOwner& owner) {
  drop([&](const Going& going) { return going.owner.get() == &owner; });
  for (auto position = coming_.begin(); position != coming_.end();) {
    position = position->second->owner.lock().get() == &owner ? coming_.erase(position) : std::next(position);
  }
}

void InProcessNetwork::Endpoint::withdraw_group(uint64_t group) {
  drop([&](const Going& going) { return going.group == group; });
  for (auto position = coming_.begin(); position != coming_.end();) {
    position = position->second->group == group ? coming_.erase(position) : std::next(position);
  }
}

void InProcessNetwork::Endpoint::forget(PeerId peer, uint64_t group) {
  if (group == 0) { // data that a lost process has not received was not sent
    return;
  }
  for (const auto& [transfer, going] : std::map<uint64_t, std::shared_ptr<Going>>(going_)) {
    if (going->group == group) {
      Header all;
      all.shared.transfer = transfer;
      all.bytes = going->bytes;
      on_taken(peer, all);
    }
  }
}

std::unique_ptr<Transport> InProcessNetwork::connect(PeerId self, MessageHandler& handler) {
  return std::make_unique<Endpoint>(shared_from_this(), self, handler);
}

} // namespace fog
