#include "transport/process_transport.hpp"

#include <algorithm>
#include <cstring>

#include <c10/util/SmallVector.h>

#include "transport/shared_memory/shared_tensors.hpp"

namespace fog {
namespace {

// Messages that a process of another host sent over MPI may arrive after the news of its end, which has its own
// connection.
constexpr auto kDrainTime = std::chrono::milliseconds(50);
// Data counts as moving by RMA for this time after a chunk has moved; a chunk takes less even on a slow link.
constexpr auto kFlowTime = std::chrono::milliseconds(2);

// Data that may wait for go() does so from this size on. Smaller data delays MPI's own messages only briefly.
constexpr size_t kLeastWaiting = size_t(1) << 20;

bool is_in_order(const Header& header) {
  // News of failures and ends do not wait.
  return header.kind == MessageKind::kData || header.kind == MessageKind::kPointToPoint;
}

} // namespace

// The transfers of one send().
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
        data_(arena_ ? arena_->at(header.address, header.bytes) : nullptr) {
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
    const bool stands = transport_.links_.stands(source_, header_.transfer, header_.withdrawals);
    Header taken;
    taken.kind = MessageKind::kTaken;
    taken.transfer = header_.transfer;
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
    Runtime& runtime,
    MessageHandler& handler,
    Watchdog& watchdog,
    std::unique_ptr<PeerMonitor> monitor,
    std::unique_ptr<shared_memory::Links> links,
    std::unique_ptr<mpi::RemoteMemory> remote_memory)
    : self_(runtime.rank()),
      size_(runtime.size()),
      has_mpi_(runtime.started()),
      handler_(handler),
      monitor_(std::move(monitor)),
      owned_links_(std::move(links)),
      links_(*owned_links_),
      streams_(links_),
      copies_(streams_, links_, released_),
      messages_(runtime, *this, watchdog),
      reductions_(runtime, messages_, watchdog, *this),
      remote_memory_(std::move(remote_memory)) {
  monitor_->show(links_.pulse());
  if (remote_memory_) {
    remote_memory_->ask(
        [this](PeerId peer) { return handler_.is_leaving(peer) || has_ended(peer); }, [this](PeerId peer) { return may_send(peer); });
    puts_ = std::make_unique<mpi::NotifiedPuts>(*remote_memory_, messages_);
    arrivals_ = std::make_unique<mpi::PutArrivals>(*remote_memory_, messages_);
  }
}

const char* ProcessTransport::way_to(PeerId peer) const {
  return links_.reaches(peer) ? "shared memory" : puts_ && puts_->reaches(peer) ? "rma" : "messages";
}

std::vector<Transport::Ended> ProcessTransport::ended() {
  std::vector<Ended> ended;
  for (const PeerId peer : processes_.ended()) {
    ended.push_back({peer, false, links_.has_departed(peer), std::chrono::milliseconds(0)});
  }
  for (const auto& [peer, silent, departed] : monitor_->poll()) {
    ended.push_back({peer, silent, departed, silent ? std::chrono::milliseconds(0) : kDrainTime});
  }
  return ended;
}

bool ProcessTransport::holds_back(PeerId destination) const {
  constexpr size_t kMostUnsent = size_t(4) << 20;
  return held_.count(destination) > 0 || links_.unsent(destination) + messages_.unsent(destination) > kMostUnsent;
}

ProcessTransport::Way ProcessTransport::way_of(PeerId destination, const Header& header, const void* data, Memory memory) const {
  const bool hold = is_in_order(header) && header.bytes > 0 && holds_back(destination);
  const bool local = links_.reaches(destination);
  if (header.bytes <= (local ? kLocalInlineBytes : kInlineBytes) && !hold) {
    return Way::kInline;
  }
  if (!local && memory != Memory::kMessages && is_in_order(header) && header.bytes > kInlineBytes && puts_ &&
      puts_->reaches(destination)) {
    return Way::kRemote; // held back or not: the data stays in its slots until it is taken
  }
  if (local && memory == Memory::kStays && links_.mapped_by(destination, data, header.bytes)) {
    return Way::kMapped;
  }
  return !local || !links_.attached_by(destination) ? Way::kPayload : memory == Memory::kMessages ? Way::kCopied : Way::kStream;
}

void ProcessTransport::send_inline(PeerId peer, const Header& header, const void* data) {
  if (links_.reaches(peer)) {
    links_.send(peer, header, data, header.bytes);
  } else {
    messages_.send(peer, header, data, header.bytes);
  }
}

Transport::Sent ProcessTransport::send(
    c10::ArrayRef<Destination> destinations,
    const Header& message,
    const void* data,
    Memory memory,
    const std::shared_ptr<TransferOwner>& owner) {
  if (destinations.size() == 1 && message.bytes <= kLocalInlineBytes) { // most messages
    const auto& [peer, scale, wants_confirm, data_waits] = destinations[0];
    if (way_of(peer, message, data, memory) == Way::kInline) {
      auto header = message;
      header.scale = scale;
      header.wants_confirm = wants_confirm ? 1 : 0;
      header.delivery = Delivery::kInline;
      send_inline(peer, header, data);
      return {};
    }
  }
  auto header = message;
  Sent sent;
  std::shared_ptr<ToSeveral> outgoing;
  const auto needed = [&] {
    if (!outgoing) {
      outgoing = std::make_shared<ToSeveral>(header.bytes);
      sent.outgoing = outgoing;
    }
    return outgoing;
  };
  c10::SmallVector<Way, 8> ways;
  std::vector<PeerId> readers;
  for (const auto& destination : destinations) {
    ways.push_back(way_of(destination.peer, header, data, memory));
    if (ways.back() == Way::kStream) {
      readers.push_back(destination.peer);
    }
  }
  // Small data may change as soon as send() returns, so it is copied if it has to be held back. Data that may be
  // overwritten is copied for receivers whose progress the stream does not track.
  const bool waits = std::any_of(ways.begin(), ways.end(), [](Way way) { return way != Way::kInline; });
  const bool waits_beside_stream =
      std::any_of(ways.begin(), ways.end(), [](Way way) { return way == Way::kMapped || way == Way::kPayload; });
  if ((waits && header.bytes <= kInlineBytes) || (waits_beside_stream && memory == Memory::kOverwritten)) {
    needed()->copy = shared_allocator().allocate(header.bytes);
    std::memcpy(outgoing->copy.get(), data, header.bytes);
    data = outgoing->copy.get();
  }
  if (!readers.empty()) {
    needed()->stream = streams_.open(readers, header.group, data, header.bytes, owner);
  }
  for (size_t i = 0; i < destinations.size(); ++i) {
    const auto& [peer, scale, wants_confirm, data_waits] = destinations[i];
    header.scale = scale;
    header.wants_confirm = wants_confirm ? 1 : 0;
    header.delivery = Delivery::kInline;
    const bool local = links_.reaches(peer);
    switch (ways[i]) {
      case Way::kInline:
        send_inline(peer, header, data);
        break;
      case Way::kStream:
        streams_.announce(*outgoing->stream, header);
        links_.send(peer, header, nullptr, 0);
        break;
      case Way::kMapped:
        header.delivery = Delivery::kMapped;
        header.address = reinterpret_cast<uintptr_t>(data);
        header.transfer = streams_.next_transfer();
        header.withdrawals = links_.inbox().withdrawals();
        if (wants_confirm) { // the kTaken message confirms it too
          header.wants_confirm = 0;
          sent.answered.push_back(peer);
        }
        needed()->add(peer);
        mapped_.emplace(header.transfer, Reading{outgoing, owner, peer});
        links_.send(peer, header, nullptr, 0);
        break;
      case Way::kCopied:
      case Way::kRemote:
      case Way::kPayload: {
        needed()->add(peer);
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
        if (ways[i] == Way::kCopied) {
          copies_.send(peer, header, data, owner, [ended] { ended(""); });
          break;
        }
        if (ways[i] == Way::kRemote) {
          if (auto put = puts_->send(peer, header, data, memory == Memory::kOverwritten, owner, ended)) {
            outgoing->puts.push_back(std::move(put));
            break;
          }
        }
        // for puts that got no slots; other receivers read the original
        if (memory == Memory::kOverwritten && !outgoing->copy) {
          outgoing->copy = shared_allocator().allocate(header.bytes);
          std::memcpy(outgoing->copy.get(), data, header.bytes);
        }
        const void* payload = outgoing->copy ? outgoing->copy.get() : data;
        const bool hold = is_in_order(header) && holds_back(peer);
        header.delivery = Delivery::kPayload;
        header.payload_tag = messages_.next_tag(peer);
        if (local) {
          links_.send(peer, header, nullptr, 0);
          messages_.look_further();
        } else {
          messages_.send(peer, header, nullptr, 0);
        }
        messages_.send_data(
            peer, header.payload_tag, payload, header.bytes, hold, data_waits && !local && header.bytes >= kLeastWaiting, owner, ended);
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
      return is_in_order(header) ? streams_.receive(source, header, owner) : copies_.receive(source, header, place, owner);
    case Delivery::kMapped:
      return std::make_shared<Mapped>(*this, source, header);
    case Delivery::kPayload:
      return messages_.receive(source, header, place, owner);
    case Delivery::kRemote:
      return arrivals_->receive(source, header, owner);
    case Delivery::kInline:
      break;
  }
  return nullptr; // the data came with its header
}

void ProcessTransport::on_message(PeerId source, const Header& header, const char* data) {
  if (header.delivery == Delivery::kRemote || header.kind == MessageKind::kSlots || header.kind == MessageKind::kPlaced) {
    if (!puts_) {
      refuse_message(source, sizeof(header), "this process has no memory for RMA");
    }
    if (handler_.has_ended(source)) { // its slots, lent or borrowed, are forgotten
      return;
    }
    if (header.kind == MessageKind::kSlots) {
      puts_->on_slots(source, header);
      return;
    }
    if (header.kind == MessageKind::kPlaced) {
      arrivals_->on_placed(source, header);
      return;
    }
    arrivals_->on_announcement(source, header);
  }
  handler_.on_message(source, header, data);
}

void ProcessTransport::on_local(PeerId source, const char* record, size_t length) {
  if (handler_.has_ended(source)) { // it counts as lost, but still runs
    return;
  }
  const auto header = checked_header(source, record, length, true);
  switch (header.kind) {
    case MessageKind::kTaken:
      if (const auto found = mapped_.find(header.transfer);
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
    default:
      if (header.delivery == Delivery::kStream && is_in_order(header)) {
        streams_.on_announcement(source, header);
      } else if (header.delivery == Delivery::kStream) {
        copies_.on_announcement(source, header);
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
  messages_.abandon(owner);
}

void ProcessTransport::ignore(PeerId source, const Header& header) {
  if (header.delivery == Delivery::kStream) {
    streams_.ignore(source, is_in_order(header) ? header : shared_memory::Copies::of_stream(header));
  } else if (header.delivery == Delivery::kRemote) {
    arrivals_->ignore(source, header);
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
  copies_.forget(peer, group);
}

void ProcessTransport::forget(PeerId peer) {
  links_.forget(peer);
  drop_mapped(false, [&](const Reading& reading) { return reading.peer == peer; }); // it reads no more data
  forget(peer, 0);
  if (puts_) {
    puts_->forget(peer);
    arrivals_->forget(peer);
  }
}

bool ProcessTransport::poll() {
  bool progressed = links_.flush();
  progressed =
      links_.poll([this](PeerId source, const char* record, size_t length) { on_local(source, record, length); }) || progressed;
  progressed = copies_.poll() || progressed;
  if (must_poll()) {
    progressed = messages_.poll() || progressed;
    const bool come = arrivals_ && arrivals_->poll();
    const bool put = (puts_ && puts_->poll()) || come;
    if (put) {
      put_ = std::chrono::steady_clock::now();
    }
    progressed = put || progressed;
  }
  return progressed;
}

Transport::Flow ProcessTransport::flow() const {
  if (given_up_) {
    return Flow::kNone;
  }
  if (puts_ && (puts_->sending() || arrivals_->must_poll()) && std::chrono::steady_clock::now() < put_ + kFlowTime) {
    return Flow::kMoves;
  }
  return !messages_.in_parts() ? Flow::kNone : messages_.moved() ? Flow::kMoves : Flow::kStill;
}

bool ProcessTransport::give_up() {
  given_up_ = true;
  if (puts_) {
    puts_->give_up();
    arrivals_->give_up();
  }
  return messages_.give_up();
}

std::vector<std::shared_ptr<TransferOwner>> ProcessTransport::take_released() {
  auto released = std::exchange(released_, {});
  const auto add = [&](std::vector<std::shared_ptr<TransferOwner>>& others) {
    std::move(others.begin(), others.end(), std::back_inserter(released));
    others.clear();
  };
  add(messages_.released());
  if (puts_) {
    add(puts_->released());
  }
  return released;
}

} // namespace fog
