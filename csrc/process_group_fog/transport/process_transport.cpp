#include "transport/process_transport.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

#include <c10/util/SmallVector.h>

#include "transport/shared_memory/shared_tensors.hpp"

namespace fog {
namespace {

// Data counts as moving by RMA for this time after a chunk has moved; a chunk takes less even on a slow link.
constexpr auto kFlowTime = std::chrono::milliseconds(2);

} // namespace

// The transfers of one call of send().
class ProcessTransport::ToSeveral final : public Outgoing {
 public:
  explicit ToSeveral(size_t bytes) : bytes_(bytes) {}

  bool done() const override {
    return readers_.empty() && (!stream || stream->sent_all());
  }
  bool done(PeerId peer) const override {
    return std::find(readers_.begin(), readers_.end(), peer) == readers_.end() && (!stream || stream->sent_all(peer));
  }
  size_t sent() const override {
    size_t sent = stream ? stream->sent() : bytes_;
    for (const auto& put : puts) {
      sent = std::min(sent, put->sent());
    }
    return sent;
  }
  std::optional<Fill> next_fill() override {
    return stream ? stream->next_fill() : std::nullopt;
  }
  void filled(const Fill& fill) override {
    stream->filled(fill);
  }

  void add(PeerId reader) {
    readers_.push_back(reader);
  }
  void remove(PeerId reader) {
    readers_.erase(std::find(readers_.begin(), readers_.end(), reader));
  }

  std::shared_ptr<shared_memory::OutgoingStream> stream;
  std::vector<std::shared_ptr<mpi::OutgoingPut>> puts;
  c10::DataPtr copy; // a copy of the data if the owner's memory may change

 private:
  const size_t bytes_;
  std::vector<PeerId> readers_; // peers that do not read the stream
};

// Data that this process reads in a peer's arena.
class ProcessTransport::Mapped final : public Incoming {
 public:
  Mapped(ProcessTransport& transport, PeerId source, const Header& header)
      : transport_(transport),
        source_(source),
        header_(header),
        arena_(transport.links_.arena_of(source)),
        inbox_(transport.links_.shared_inbox_of(source)),
        data_(arena_ ? arena_->at(header.shared.address, header.bytes) : nullptr) {
    if (!arena_) { // the peer was forgotten meanwhile
      throw Unreachable(source);
    }
    if (data_ == nullptr) {
      refuse_message(source, sizeof(header), "its data is not in its sender's arena");
    }
  }

  size_t available() const override {
    return header_.bytes;
  }
  void read(size_t from, size_t to, std::vector<Block>& blocks) const override {
    blocks.push_back({from, to, data_ + from});
  }
  bool take(size_t bytes) override {
    if (bytes < header_.bytes) {
      return true;
    }
    if (transport_.links_.shared_inbox_of(source_) != inbox_) { // another process has taken the sender's place
      return false;
    }
    const bool stands = transport_.links_.stands(source_, header_.shared.transfer, header_.shared.withdrawals);
    Header taken;
    taken.kind = MessageKind::kTaken;
    taken.shared.transfer = header_.shared.transfer;
    transport_.links_.send(source_, taken, nullptr, 0);
    return stands;
  }

 private:
  ProcessTransport& transport_;
  const PeerId source_;
  const Header header_;
  const std::shared_ptr<const shared_memory::ForeignArena> arena_;
  const std::shared_ptr<const shared_memory::Inbox> inbox_;
  const char* const data_;
};

ProcessTransport::ProcessTransport(
    PeerId self,
    MessageHandler& handler,
    std::unique_ptr<shared_memory::Links> links,
    std::unique_ptr<tcp::Connections> connections,
    std::unique_ptr<mpi::RemoteMemory> remote_memory)
    : self_(self),
      max_ranks_(links->max_ranks()),
      handler_(handler),
      owned_links_(std::move(links)),
      links_(*owned_links_),
      streams_(links_),
      wire_(std::move(connections), static_cast<MessageHandler&>(*this), links_.pulse()),
      remote_memory_(std::move(remote_memory)) {
  wire_.connections().start(self_, links_.doorbell(), [this] { links_.pulse().announced.fetch_add(1); });
  if (remote_memory_) {
    remote_memory_->ask(
        [this](PeerId peer) {
          return !peers()[peer].is_alive() || processes_.has_ended(peer) || wire_.connections().is_closed_by(peer);
        },
        [this](PeerId peer) {
          wire_.watch(peer);
          return wire_.connections().fd(peer) >= 0;
        });
    puts_ = std::make_unique<mpi::NotifiedPuts>(*remote_memory_, wire_);
    arrivals_ = std::make_unique<mpi::PutArrivals>(*remote_memory_, wire_);
  }
}

void ProcessTransport::connect(PeerId peer, const std::string& tcp) {
  wire_.renew(peer, tcp);
  if (!links_.reaches(peer)) {
    wire_.connections().want(peer);
  }
}

std::string ProcessTransport::way_to(PeerId peer) const {
  if (links_.reaches(peer)) {
    return "shared memory";
  }
  if (!puts_ || !puts_->reaches(peer)) {
    return wire_.way_to(peer);
  }
  return remote_memory_->completes_alone() ? "rma" : "rma, exchanges only";
}

std::vector<PeerId> ProcessTransport::spoken_with() const {
  std::vector<PeerId> peers;
  for (PeerId peer = 0; peer < max_ranks_; ++peer) {
    if (peer != self_ && has_spoken_with(peer)) {
      peers.push_back(peer);
    }
  }
  return peers;
}

std::vector<Transport::Ended> ProcessTransport::ended() {
  std::vector<Ended> ended;
  for (const PeerId peer : processes_.ended()) {
    ended.push_back({peer, links_.has_departed(peer) ? Peer::State::kLeft : Peer::State::kLost, kLost});
  }
  const auto others = wire_.connections().take_ended();
  ended.insert(ended.end(), others.begin(), others.end());
  return ended;
}

bool ProcessTransport::holds_back(PeerId destination) const {
  constexpr size_t kMostUnsent = size_t(4) << 20;
  return held_.count(destination) > 0 || unsent(destination) > kMostUnsent;
}

ProcessTransport::Way ProcessTransport::way_of(PeerId destination, const Header& header, const void* data, Memory memory) const {
  const bool hold = is_in_order(header) && header.bytes > 0 && holds_back(destination);
  const bool local = links_.reaches(destination);
  if (header.bytes <= kLocalInlineBytes && !hold) {
    return Way::kInline;
  }
  if (!local && memory != Memory::kMessages && is_in_order(header) && header.bytes > kInlineBytes && puts_ &&
      puts_->reaches(destination)) {
    return Way::kRemote; // held back or not: the data stays in its slots until it is taken
  }
  if (local && memory == Memory::kStays && links_.mapped_by(destination, data, header.bytes)) {
    return Way::kMapped;
  }
  if (local && memory == Memory::kMessages) {
    return Way::kFragments;
  }
  return local && links_.attached_by(destination) ? Way::kStream : Way::kPayload;
}

void ProcessTransport::send_header(PeerId peer, const Header& header, const void* data, size_t bytes) {
  if (links_.reaches(peer)) {
    links_.send(peer, header, data, bytes);
  } else {
    wire_.send(peer, header, data, bytes);
  }
}

Transport::Sent ProcessTransport::send(
    c10::ArrayRef<Destination> destinations,
    const Header& message,
    const void* data,
    Memory memory,
    const std::shared_ptr<TransferOwner>& owner) {
  auto header = message;
  Sent sent;
  c10::SmallVector<Way, 8> ways;
  std::vector<PeerId> readers;
  for (const auto& destination : destinations) {
    ways.push_back(way_of(destination.peer, header, data, memory));
    if (ways.back() == Way::kStream) {
      readers.push_back(destination.peer);
    }
  }
  std::shared_ptr<ToSeveral> outgoing;
  if (std::any_of(ways.begin(), ways.end(), [](Way way) { return way != Way::kInline; })) {
    sent.outgoing = outgoing = std::make_shared<ToSeveral>(header.bytes);
  }
  // Small data may change as soon as send() returns, so it is copied if it has to be held back. Data that may be
  // overwritten is copied for receivers whose progress the stream does not track; others read the original.
  const auto copied = [&, original = data] {
    if (!outgoing->copy) {
      outgoing->copy = shared_allocator().allocate(header.bytes);
      std::memcpy(outgoing->copy.get(), original, header.bytes);
    }
    return outgoing->copy.get();
  };
  if (outgoing && header.bytes <= kInlineBytes) {
    data = copied();
  }
  if (!readers.empty()) {
    outgoing->stream = streams_.open(readers, header.group, data, header.bytes, owner);
  }
  for (size_t i = 0; i < destinations.size(); ++i) {
    const auto& [peer, scale, wants_confirm, only_sender] = destinations[i];
    header.scale = scale;
    header.wants_confirm = wants_confirm ? 1 : 0;
    header.delivery = Delivery::kInline;
    switch (ways[i]) {
      case Way::kInline:
        send_header(peer, header, data, header.bytes);
        break;
      case Way::kStream:
        streams_.announce(*outgoing->stream, header);
        links_.send(peer, header, nullptr, 0);
        break;
      case Way::kMapped:
        header.delivery = Delivery::kMapped;
        header.shared = {streams_.next_transfer(), reinterpret_cast<uintptr_t>(data), links_.inbox().withdrawals(), 0};
        if (wants_confirm) { // the kTaken message confirms it too
          header.wants_confirm = 0;
          sent.answered.push_back(peer);
        }
        outgoing->add(peer);
        mapped_.emplace(header.shared.transfer, Reading{outgoing, owner, peer});
        links_.send(peer, header, nullptr, 0);
        break;
      case Way::kFragments: // nobody here or there helps to move the data, so all of it waits for space if there is none
        for (size_t begin = 0; begin < header.bytes; begin += kLocalInlineBytes) {
          Header fragment;
          fragment.kind = MessageKind::kFragment;
          fragment.bytes = std::min(kLocalInlineBytes, header.bytes - begin);
          links_.send(peer, fragment, static_cast<const char*>(data) + begin, fragment.bytes);
        }
        header.delivery = Delivery::kFragments;
        links_.send(peer, header, nullptr, 0);
        break;
      case Way::kRemote:
      case Way::kPayload: {
        outgoing->add(peer);
        const auto ended = [outgoing, to = peer, owner = std::weak_ptr<TransferOwner>(owner)](const std::string& error) {
          if (!error.empty()) {
            outgoing->error = error;
            outgoing->failed_peer = to;
          }
          outgoing->remove(to);
          if (const auto alive = owner.lock()) {
            alive->on_progress();
          }
        };
        if (ways[i] == Way::kRemote) {
          if (auto put = puts_->send(peer, header, data, memory == Memory::kOverwritten, owner, ended)) {
            outgoing->puts.push_back(std::move(put));
            break;
          }
        }
        const void* payload = memory == Memory::kOverwritten ? copied() : data;
        header.delivery = Delivery::kPayload;
        header.payload_tag = wire_.next_tag(peer);
        send_header(peer, header, nullptr, 0);
        using Early = tcp::Messages::Early;
        const bool by_wire = !links_.reaches(peer) && held_.count(peer) == 0;
        const auto early = !by_wire ? Early::kNothing : only_sender ? Early::kToReceiver : Early::kOverLongPath;
        wire_.send_data(peer, header.payload_tag, payload, header.bytes, owner, ended, early);
        break;
      }
    }
  }
  return sent;
}

std::shared_ptr<Incoming> ProcessTransport::receive(
    PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner) {
  switch (header.delivery) {
    case Delivery::kStream:
      return streams_.receive(source, header, owner);
    case Delivery::kMapped:
      return std::make_shared<Mapped>(*this, source, header);
    case Delivery::kPayload:
      return wire_.receive(source, header, place, owner);
    case Delivery::kRemote:
      return arrivals_->receive(source, header, owner);
    case Delivery::kInline:
    case Delivery::kFragments:
      break;
  }
  return nullptr; // the data came with its header, or before
}

void ProcessTransport::on_message(PeerId source, const Header& header, const char* data) {
  const auto is = [&header](MessageKind kind) { return header.kind == kind; };
  const bool of_puts = is(MessageKind::kSlots) || is(MessageKind::kPlaced) || is(MessageKind::kTaken) || is(MessageKind::kWanted);
  if (of_puts || header.delivery == Delivery::kRemote) {
    if (!puts_) {
      refuse_message(source, sizeof(header), "this process has no memory for RMA");
    }
    if (peers()[source].is_lost()) { // its slots, lent or borrowed, are forgotten
      return;
    }
    switch (header.kind) {
      case MessageKind::kSlots:
        puts_->on_slots(source, header);
        return;
      case MessageKind::kTaken:
        puts_->on_taken(source, header);
        return;
      case MessageKind::kWanted:
        puts_->on_wanted(source, header);
        return;
      case MessageKind::kPlaced:
        arrivals_->on_placed(source, header);
        return;
      default:
        arrivals_->on_announcement(source, header);
    }
  }
  handler_.on_message(source, header, data);
}

void ProcessTransport::on_local(PeerId source, const char* record, size_t length) {
  if (peers()[source].is_lost()) { // it counts as lost, but still runs
    return;
  }
  const auto header = checked_header(source, record, length, true);
  switch (header.kind) {
    case MessageKind::kTaken:
      if (const auto found = mapped_.find(header.shared.transfer);
          found != mapped_.end() && found->second.peer == source) { // otherwise it was withdrawn
        auto reading = std::move(found->second);
        mapped_.erase(found);
        end(std::move(reading));
      }
      return;
    case MessageKind::kFilled:
      streams_.on_filled(source, header);
      return;
    case MessageKind::kEmptied:
      streams_.on_emptied(source, header);
      return;
    case MessageKind::kWanted:
      streams_.on_wanted(source, header);
      return;
    case MessageKind::kFragment:
      fragments_[source].insert(fragments_[source].end(), record + sizeof(header), record + length);
      return;
    default:
      if (header.delivery == Delivery::kFragments) {
        const auto data = std::exchange(fragments_[source], {});
        if (data.size() != header.bytes) {
          refuse_message(source, length, "its data has another length");
        }
        handler_.on_message(source, header, data.data());
        return;
      }
      if (header.delivery == Delivery::kStream) {
        streams_.on_announcement(source, header);
      }
      handler_.on_message(source, header, header.delivery == Delivery::kInline ? record + sizeof(header) : nullptr);
  }
}

void ProcessTransport::end(Reading reading) {
  reading.outgoing->remove(reading.peer);
  reading.owner->on_progress();
  released_.push_back(std::move(reading.owner));
}

template <typename Which>
void ProcessTransport::drop_mapped(bool withdraw, Which&& which) {
  for (auto position = mapped_.begin(); position != mapped_.end();) {
    if (which(position->second)) {
      released_.push_back(std::move(position->second.owner)); // first, because there may be no memory for it
      if (withdraw) {
        links_.inbox().withdraw(position->first);
      }
      position = mapped_.erase(position);
    } else {
      ++position;
    }
  }
}

void ProcessTransport::withdraw(const TransferOwner& owner) {
  drop_mapped(true, [&](const Reading& reading) { return reading.owner.get() == &owner; });
  streams_.withdraw(owner);
  streams_.abandon(owner);
  if (puts_) {
    puts_->withdraw(owner);
    arrivals_->abandon(owner);
  }
  wire_.abandon(owner);
}

void ProcessTransport::ignore(PeerId source, const Header& header) {
  if (header.delivery == Delivery::kStream) {
    streams_.ignore(source, header);
  } else if (header.delivery == Delivery::kRemote) {
    arrivals_->ignore(source, header);
  } else if (header.delivery == Delivery::kPayload) {
    wire_.ignore(source, header);
  }
}

void ProcessTransport::withdraw_group(uint64_t group) {
  streams_.withdraw_group(group);
  if (arrivals_) {
    arrivals_->withdraw_group(group);
  }
}

void ProcessTransport::forget(PeerId peer, uint64_t group) {
  streams_.forget(peer, group);
}

void ProcessTransport::forget(PeerId peer) {
  links_.forget(peer);
  drop_mapped(false, [&](const Reading& reading) { return reading.peer == peer; }); // it reads no more data
  forget(peer, 0);
  wire_.forget(peer);
  fragments_.erase(peer);
  if (puts_) {
    puts_->forget(peer);
    arrivals_->forget(peer);
  }
}

bool ProcessTransport::poll() {
  bool progressed = links_.flush();
  progressed =
      links_.poll([this](PeerId source, const char* record, size_t length) { on_local(source, record, length); }) || progressed;
  progressed = wire_.poll() || progressed;
  if (uses_mpi()) {
    remote_memory_->answer();
    const bool come = arrivals_->poll();
    const bool put = puts_->poll() || come;
    if (put) {
      put_ = std::chrono::steady_clock::now();
    }
    progressed = put || progressed;
  }
  return progressed;
}

bool ProcessTransport::data_moves() const {
  return uses_mpi() && (puts_->sending() || arrivals_->must_poll()) && std::chrono::steady_clock::now() < put_ + kFlowTime;
}

bool ProcessTransport::give_up() {
  if (!uses_mpi()) {
    return false;
  }
  given_up_ = true;
  puts_->give_up();
  arrivals_->give_up();
  return true;
}

std::vector<std::shared_ptr<TransferOwner>> ProcessTransport::take_released() {
  auto released = std::exchange(released_, {});
  const auto add = [&](std::vector<std::shared_ptr<TransferOwner>>& others) {
    std::move(others.begin(), others.end(), std::back_inserter(released));
    others.clear();
  };
  add(wire_.released());
  if (puts_) {
    add(puts_->released());
  }
  return released;
}

} // namespace fog
