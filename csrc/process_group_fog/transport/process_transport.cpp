#include "transport/process_transport.hpp"

#include <algorithm>

#include "transport/process_transfers.hpp"

namespace fog {
namespace {

// Data counts as moving by RMA for this time after a chunk has moved; a chunk takes less even on a slow link.
constexpr auto kFlowTime = std::chrono::milliseconds(2);

} // namespace

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
      copies_(streams_, links_, released_),
      wire_(std::move(connections), static_cast<MessageHandler&>(*this), handler, links_.pulse()),
      remote_memory_(std::move(remote_memory)) {
  wire_.connections().start(self_, links_.doorbell(), [this] { links_.pulse().announced.fetch_add(1); });
  if (remote_memory_) {
    remote_memory_->ask(
        [this](PeerId peer) { return handler_.is_leaving(peer) || has_ended(peer); },
        [this](PeerId peer) {
          wire_.watch(peer);
          return wire_.connections().fd(peer) >= 0;
        });
    puts_ = std::make_unique<mpi::NotifiedPuts>(*remote_memory_, wire_);
    arrivals_ = std::make_unique<mpi::PutArrivals>(*remote_memory_, wire_);
  }
}

void ProcessTransport::meet(PeerId peer, const std::string& tcp) {
  wire_.renew(peer, tcp);
  if (!links_.reaches(peer)) {
    wire_.connections().want(peer);
  }
}

const char* ProcessTransport::way_to(PeerId peer) const {
  if (links_.reaches(peer)) {
    return "shared memory";
  }
  return !puts_ || !puts_->reaches(peer) ? "tcp" : remote_memory_->completes_alone() ? "rma" : "rma, exchanges only";
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
    ended.push_back({peer, kLost, false, links_.has_departed(peer)});
  }
  const auto others = wire_.connections().take_ended();
  ended.insert(ended.end(), others.begin(), others.end());
  return ended;
}

std::shared_ptr<Incoming> ProcessTransport::receive(
    PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner) {
  switch (header.delivery) {
    case Delivery::kStream:
      return is_in_order(header) ? streams_.receive(source, header, owner) : copies_.receive(source, header, place, owner);
    case Delivery::kMapped:
      return std::make_shared<Mapped>(*this, source, header);
    case Delivery::kPayload:
      return wire_.receive(source, header, place, owner);
    case Delivery::kRemote:
      return arrivals_->receive(source, header, owner);
    case Delivery::kInline:
      break;
  }
  return nullptr; // the data came with its header
}

void ProcessTransport::on_message(PeerId source, const Header& header, const char* data) {
  const auto is = [&header](MessageKind kind) { return header.kind == kind; };
  const bool of_puts = is(MessageKind::kSlots) || is(MessageKind::kPlaced) || is(MessageKind::kTaken) || is(MessageKind::kWanted);
  if (of_puts || header.delivery == Delivery::kRemote) {
    if (!puts_) {
      refuse_message(source, sizeof(header), "this process has no memory for RMA");
    }
    if (handler_.has_ended(source)) { // its slots, lent or borrowed, are forgotten
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
  wire_.abandon(owner);
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
  wire_.forget(peer);
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
