#include "transport/tcp/messages.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include <c10/util/Exception.h>

#include "core/failure.hpp"
#include "core/settings.hpp"

namespace fog::tcp {
namespace {

// Between two questions to a peer for its signs of life.
constexpr auto kAskInterval = std::chrono::milliseconds(250);
// A message waits for the part of large data that has begun, and for what is in the system's buffer but not on its way.
// Each of the two is what the connection carries in kDelay, within these limits, measured over kMeasured at least: on a
// slow link a fixed amount would let every answer wait, and on a fast one less would cost the processor's time.
constexpr size_t kLeastUnsent = size_t(32) << 10;
constexpr size_t kMostUnsent = size_t(256) << 10;
constexpr auto kDelay = std::chrono::milliseconds(5);
// What goes early to a receiver that nobody else sends to. On a slow link, the receiver's question waits behind the data that
// the receiver itself sends, at 200 Mbit/s for some 3 ms, in which its sender's link would be idle in each hop of a ring.
constexpr size_t kEarlyOfOnlySender = size_t(512) << 10;
constexpr auto kMeasured = std::chrono::milliseconds(10);

} // namespace

Messages::Messages(std::unique_ptr<Connections> connections, MessageHandler& handler, const Pulse& pulse)
    : connections_(std::move(connections)), handler_(handler), pulse_(pulse), fixed_(static_cast<size_t>(settings().connections)) {}

Messages::~Messages() = default;

const std::shared_ptr<Messages::Link>& Messages::shared_link(PeerId peer) {
  auto& link = links_[peer];
  if (!link) {
    link = std::make_shared<Link>(peer, static_cast<Channel::User&>(*this));
  }
  return link;
}

void Messages::check_reachable(PeerId peer) const {
  // It does no harm to send to a process that has just ended: its loss ends what waits for it.
  if (handler_.peers()[peer].is_lost()) {
    throw Unreachable(peer);
  }
  TORCH_CHECK_WITH(DistBackendError, connections_->knows(peer), "fog: the address of world rank ", peer, " is not known");
}

void Messages::send(PeerId destination, const Header& header, const void* data, size_t bytes) {
  check_reachable(destination);
  auto& its = link(destination);
  its.channel.queue(header, data, bytes);
  if (header.kind == MessageKind::kGoodbye) {
    its.channel.finish();
  }
  flush(destination, its);
}

void Messages::send_data(
    PeerId destination,
    uint32_t tag,
    const void* data,
    size_t bytes,
    const std::shared_ptr<TransferOwner>& owner,
    Sent sent,
    Early early) {
  check_reachable(destination);
  auto outgoing = std::make_shared<OutgoingData>();
  outgoing->tag = tag;
  outgoing->data = static_cast<const char*>(data);
  outgoing->bytes = bytes;
  outgoing->owner = owner;
  outgoing->sent = std::move(sent);
  auto& its = link(destination);
  its.channel.offer(std::move(outgoing), early == Early::kNothing ? 0 : early_room(destination, its, early));
  flush(destination, its);
}

size_t Messages::early_room(PeerId peer, Link& its, Early early) {
  if (const auto now = Clock::now(); now >= its.looked + kMeasured) {
    its.looked = now;
    // The rate is that of the last data, which may have been little; a path that has become slower counts after a while.
    const auto path = connections_->path(peer);
    its.in_flight = std::max(path ? path->in_flight() : 0, its.in_flight - its.in_flight / 8);
  }
  const auto most = std::clamp(its.in_flight, early == Early::kToReceiver ? kEarlyOfOnlySender : 0, kMostEarly);
  return most - std::min(most, its.channel.early());
}

std::shared_ptr<Incoming> Messages::receive(
    PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner) {
  check_reachable(source);
  const auto& its = shared_link(source);
  const auto grant = [this, source, tag = header.payload_tag, link = std::weak_ptr<Link>(its)](size_t room) {
    if (const auto from = link.lock()) { // otherwise another process has the number by now
      from->channel.ask(tag, room);
      flush(source, *from);
    }
  };
  auto data = std::make_shared<IncomingData>(header, place, owner, grant);
  if (!its->closed) {
    its->channel.expect(header.payload_tag, data);
  } else if (auto kept = data->end()) {
    release(std::move(kept)); // the loss of the peer ends the operation
  }
  return data;
}

void Messages::abandon(const TransferOwner& owner) {
  for (const auto& [peer, its] : links_) {
    its->channel.abandon(owner);
    flush(peer, *its);
  }
}

void Messages::flush(PeerId peer, Link& its) {
  if (its.closed || its.ended || !its.channel.wants_to_write()) {
    return;
  }
  if (connections_->fd(peer) < 0) {
    if (its.channel.unsent() > 0) {
      connections_->want(peer);
    }
    return;
  }
  for (size_t number = 0; number < its.watches_writes.size(); ++number) {
    if (number == 0 || !its.watches_writes[number]) { // an additional one that is full tells when it is not
      write(peer, its, number);
    }
  }
}

void Messages::write(PeerId peer, Link& its, size_t number) {
  if (its.closed || !its.channel.wants_to_write(number)) {
    return;
  }
  progressed_ = its.channel.write(number, connections_->fd(peer, number)) == Channel::Result::kProgress || progressed_;
  if (its.channel.is_mute()) {
    connections_->shut(peer); // the peer learns of it
  }
  const bool waits = its.channel.wants_to_write(number);
  if (waits == its.watches_writes[number]) {
    return;
  }
  its.watches_writes[number] = waits;
  if (number == 0) {
    its.written = its.channel.written();
    its.measured = Clock::now();
    its.growth.begin();
  }
  connections_->watch_writes(peer, number, waits);
}

void Messages::measure(PeerId peer, Link& its) {
  const auto time = Clock::now() - its.measured;
  if (!its.watches_writes[0] || time < kMeasured) {
    return;
  }
  const auto written = its.channel.written() - std::exchange(its.written, its.channel.written());
  its.measured += time;
  const auto bytes = static_cast<size_t>(static_cast<double>(written) * (std::chrono::duration<double>(kDelay) / time));
  limit_unsent(peer, its, std::clamp(bytes, kLeastUnsent, kMostUnsent));
  if (fixed_ > 0) {
    return;
  }
  if (const auto path = connections_->path(peer); path && its.growth.look(its.measured, its.channel.written_by_all(), *path)) {
    connections_->want_additional(peer);
  }
  its.channel.use(its.growth.used());
}

void Messages::grow_to_fixed(PeerId peer, const Link& its) {
  if (its.growth.used() + 1 < fixed_) {
    connections_->want_additional(peer);
  }
}

void Messages::limit_unsent(PeerId peer, Link& its, size_t bytes) {
  if (bytes > its.most_unsent + its.most_unsent / 4 || bytes < its.most_unsent - its.most_unsent / 4) {
    its.most_unsent = bytes;
    its.channel.limit_parts(bytes);
    for (size_t number = 0; number < its.watches_writes.size(); ++number) {
      connections_->limit_unsent(peer, number, bytes);
    }
  }
}

void Messages::on_open(PeerId peer) {
  auto& its = link(peer);
  its.watches_writes[0] = false;
  limit_unsent(peer, its, kMostUnsent);
  if (departed_) {
    Header goodbye;
    goodbye.kind = MessageKind::kGoodbye;
    its.channel.queue(goodbye, nullptr, 0);
  }
  grow_to_fixed(peer, its);
  flush(peer, its);
}

void Messages::on_open_additional(PeerId peer, size_t number, bool own) {
  auto& its = link(peer);
  its.watches_writes.push_back(false);
  its.channel.add(own);
  connections_->limit_unsent(peer, number, its.most_unsent);
  if (own) {
    its.growth.on_open();
    its.channel.use(its.growth.used());
    grow_to_fixed(peer, its);
  }
  if (departed_) {
    its.channel.finish();
  }
  flush(peer, its);
}

void Messages::on_writable(PeerId peer, size_t number) {
  if (number == 0) {
    measure(peer, link(peer));
  }
  write(peer, link(peer), number);
  auto& its = link(peer);
  if (!its.closed && its.watches_writes[number] && !its.channel.wants_to_write(number)) { // another call has written the rest
    its.watches_writes[number] = false;
    connections_->watch_writes(peer, number, false);
  }
}

void Messages::on_readable(PeerId peer, size_t number) {
  auto& its = link(peer);
  if (its.closed) {
    return;
  }
  try {
    const auto result = its.channel.read(number, connections_->fd(peer, number));
    progressed_ = progressed_ || result != Channel::Result::kNothing;
    if (its.goodbye && !its.channel.awaits_others()) {
      const auto goodbye = *std::exchange(its.goodbye, std::nullopt);
      on_message(peer, reinterpret_cast<const char*>(&goodbye), sizeof(goodbye));
    }
    if (result == Channel::Result::kEnd) {
      on_end(peer, its, number);
    }
    if (its.goodbye ? its.channel.awaits_lost() : its.ended) {
      break_off(peer, its);
    }
    if (its.closed) {
      return;
    }
  } catch (const c10::DistBackendError&) {
    break_off(peer, its);
    throw;
  }
  flush(peer, its); // answers, and data that the peer has asked for
}

void Messages::on_message(PeerId source, const char* record, size_t length) {
  const auto header = checked_header(source, record, length, false);
  if (header.kind == MessageKind::kGoodbye && link(source).channel.awaits_others()) {
    link(source).goodbye = header;
    return;
  }
  link(source).departed = link(source).departed || header.kind == MessageKind::kGoodbye;
  if (header.delivery == Delivery::kPayload) {
    link(source).channel.announce(header.payload_tag);
  }
  handler_.on_message(source, header, header.delivery == Delivery::kInline ? record + sizeof(header) : nullptr);
}

void Messages::on_end(PeerId peer, Link& its, size_t number) {
  if (number > 0) {
    connections_->drop_additional(peer, number); // its sender learns of the end
    if (its.channel.sends(number)) {
      // What it has taken may be lost, but the peer may have left in good order too. The end of the first connection tells.
      its.channel.mute();
      connections_->shut(peer);
    } else {
      its.channel.on_end(number);
    }
  } else if (its.goodbye) {
    connections_->stop_watching(peer);
    its.ended = true;
  } else {
    break_off(peer, its);
  }
}

void Messages::break_off(PeerId peer, Link& its) {
  if (std::exchange(its.closed, true)) {
    return;
  }
  its.channel.close();
  connections_->on_end(peer, its.channel.error(), its.departed, its.expelled);
}

void Messages::watch(PeerId peer) {
  if (connections_->knows(peer)) {
    connections_->want(peer);
  }
}

std::optional<Signs> Messages::signs_of(PeerId peer) {
  const auto found = links_.find(peer);
  if (found == links_.end() || connections_->fd(peer) < 0) {
    return std::nullopt;
  }
  auto& its = *found->second;
  if (const auto now = Clock::now(); !its.answers && now >= its.asked + kAskInterval) {
    its.asked = now;
    its.answers = true;
    its.channel.ask_for_signs();
    flush(peer, its);
  }
  return its.signs;
}

void Messages::on_signs(PeerId source, const Signs& signs) {
  auto& its = link(source);
  its.signs = signs;
  its.answers = false;
}

void Messages::expel(PeerId peer) {
  if (connections_->fd(peer) >= 0) {
    auto& its = link(peer);
    its.channel.expel();
    flush(peer, its);
  }
}

std::vector<PeerId> Messages::expelled_by() {
  auto peers = std::exchange(expelled_by_, {});
  const auto refused = connections_->take_refused();
  peers.insert(peers.end(), refused.begin(), refused.end());
  return peers;
}

std::string Messages::way_to(PeerId peer) const {
  const auto found = links_.find(peer);
  if (found == links_.end() || found->second->growth.used() == 0) {
    return "tcp";
  }
  const auto& growth = found->second->growth;
  std::string text = "tcp: " + std::to_string(growth.used() + 1) + " connections";
  if (const auto path = connections_->path(peer)) {
    std::array<char, 100> more = {};
    std::snprintf(more.data(), more.size(), ", round trip %.1f ms, %.0f Mbit/s", 1e3 * path->least_round_trip, 8e-6 * growth.rate());
    text += more.data();
  }
  return text;
}

void Messages::forget(PeerId peer) {
  connections_->close(peer);
  const auto found = links_.find(peer);
  if (found != links_.end() && !std::exchange(found->second->closed, true)) {
    found->second->channel.close();
  }
}

void Messages::renew(PeerId peer, const std::string& line) {
  forget(peer);
  links_.erase(peer);
  expelled_by_.erase(std::remove(expelled_by_.begin(), expelled_by_.end(), peer), expelled_by_.end());
  connections_->renew(peer, line);
}

bool Messages::poll() {
  progressed_ = false;
  connections_->poll(*this);
  return progressed_;
}

bool Messages::sending() const {
  return connections_->is_connecting() || std::any_of(links_.begin(), links_.end(), [](const auto& each) {
           return !each.second->closed && each.second->channel.wants_to_write();
         });
}

} // namespace fog::tcp
