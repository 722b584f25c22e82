#include "engine/operation.hpp"

#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "core/copy.hpp"
#include "engine/flight_record.hpp"
#include "engine/group.hpp"
#include "transport/shared_memory/shared_tensors.hpp"

namespace fog {
namespace {

// "rank 2", "ranks 0, 3", "ranks 0, 1, 2 and 5 more"
std::string ranks(const std::set<int>& numbers) {
  constexpr size_t kNamed = 20;
  std::string text = numbers.size() == 1 ? "rank " : "ranks ";
  size_t named = 0;
  for (const int number : numbers) {
    if (named++ == kNamed) {
      return text + " and " + std::to_string(numbers.size() - kNamed) + " more";
    }
    text += (named == 1 ? "" : ", ") + std::to_string(number);
  }
  return text;
}

} // namespace

void Operation::begin(
    const std::shared_ptr<Group>& group,
    uint64_t key,
    uint64_t sequence,
    std::chrono::milliseconds timeout,
    Deadline deadline,
    NameTable::Use use) {
  group_ = group;
  key_ = key;
  sequence_ = sequence;
  use_ = use;
  timeout_ = timeout;
  deadline_ = deadline;
  state_ = State::kActive;
  work_->set_sequence(sequence);
  launch();
}

int Operation::rank() const {
  return group_->rank;
}

int Operation::size() const {
  return group_->size();
}

const Machines& Operation::hosts() const {
  return group_->layout.hosts;
}

bool Operation::heard_from(int peer) const {
  return std::any_of(
      receives_.begin(), receives_.end(), [peer](const Receive& receive) { return receive.arrived && receive.peer == peer; });
}

bool Operation::expects(int peer) const {
  return std::any_of(
      receives_.begin(), receives_.end(), [peer](const Receive& receive) { return !receive.arrived && receive.peer == peer; });
}

bool Operation::owns(int source, const Header& header) const {
  return (header.operation.key & kNamedKey) == 0 ||
      group_->names.is_of_latest(header.operation.key, source, {header.operation.use, header.operation.generation}, expects(source));
}

std::string Operation::describe() const {
  std::ostringstream text;
  text << name_of(signature_.kind) << " #" << sequence_ << " [" << signature_.describe() << "] of group '" << group_->name
       << "' on rank " << group_->rank;
  return text.str();
}

std::string Operation::describe_awaited() const {
  const auto peers = awaited();
  if (peers.empty()) {
    return "; waiting for any rank";
  }
  std::set<int> absent;
  std::set<int> others;
  for (const int peer : peers) {
    (heard_from(peer) ? others : absent).insert(peer);
  }
  std::string more;
  if (inquiry && signature_.kind != OpKind::kPointToPoint) { // the inquiry knows more, and about more ranks
    std::set<int> without; // ranks that have ended the operation without this rank
    std::set_intersection(
        peers.begin(), peers.end(), inquiry->ended().begin(), inquiry->ended().end(), std::inserter(without, without.end()));
    absent = inquiry->absent();
    absent.insert(inquiry->silent().begin(), inquiry->silent().end());
    absent.insert(without.begin(), without.end());
    others.clear();
    std::set_difference(peers.begin(), peers.end(), absent.begin(), absent.end(), std::inserter(others, others.end()));
    if (!inquiry->silent().empty()) {
      more += " (no answer from " + ranks(inquiry->silent()) + ")";
    }
    if (!without.empty()) {
      more += " (" + ranks(without) + " completed it without this rank)";
    }
  }
  return (absent.empty() ? "" : "; not there: " + ranks(absent) + more) + (others.empty() ? "" : "; waiting for " + ranks(others));
}

std::set<int> Operation::awaited(bool announced) const {
  std::set<int> peers(unconfirmed_.begin(), unconfirmed_.end());
  for (const auto& receive : receives_) {
    if (!receive.complete && (announced || !receive.arrived)) {
      peers.insert(receive.peer);
    }
  }
  for (const auto& going : going_) {
    for (const int peer : going.peers) {
      if (announced && !going.data->done(group_->members[peer].peer_id)) {
        peers.insert(peer);
      }
    }
  }
  peers.erase(-1); // any source
  return peers;
}

Header Operation::header_for(uint16_t step, size_t bytes) const {
  Header header;
  header.kind = signature_.kind == OpKind::kPointToPoint ? MessageKind::kPointToPoint : MessageKind::kData;
  header.operation.step = step;
  header.operation.use = use_.number;
  header.operation.generation = use_.generation;
  header.group = group_->id;
  header.operation.key = key_;
  header.bytes = bytes;
  header.operation.signature = signature_;
  return header;
}

void Operation::on_unmatched(int source, const Header& header) {
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(
          "got a message from rank ", source, " that it does not expect: rank ", source, " called ",
          header.operation.signature.describe(), " and sends to this rank, which does not receive from it"));
}

void Operation::on_message(int source, const Header& header, const char* data) {
  if (ended()) {
    return;
  }
  if (!signature_.agrees_with(header.operation.signature)) {
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            "ranks disagree: this rank called ", signature_.describe(), ", rank ", source, " called ",
            header.operation.signature.describe()));
  }
  const auto found = find_receive(source, header.operation.step);
  if (!found) {
    on_unmatched(source, header);
    return;
  }
  auto& receive = receives_[*found];
  if (!receive.any_size && receive.bytes != header.bytes) {
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            "ranks disagree: this rank expects ", receive.bytes, " bytes from rank ", source, ", which sends ", header.bytes, " (",
            header.operation.signature.describe(), ")"));
  }
  receive.arrived = true;
  receive.peer = source;
  receive.header = header;
  FlightRecord::note_arrival(flight, group_->members[source].peer_id);
  if (times) {
    note_arrival(source, header.bytes);
  }
  if (header.wants_confirm != 0) {
    confirm_to(source);
  }
  if (receive.any_size) {
    if (header.delivery == Delivery::kInline) {
      receive.stash.assign(data, data + header.bytes);
    }
    complete_receive(receive);
  } else {
    take(*found, data);
  }
}

std::optional<size_t> Operation::find_receive(int source, uint16_t step) {
  constexpr size_t kFew = 16; // up to this number a linear search is as fast; of many, each would cost as many comparisons
  const auto fits = [&](size_t index) {
    const auto& receive = receives_[index];
    return !receive.arrived && receive.step == step && (receive.peer == source || receive.peer == -1);
  };
  if (receives_.size() > kFew) { // no receive here is from any source: an operation with such a receive has only one
    for (size_t index = index_.size(); index < receives_.size(); ++index) {
      index_.emplace(std::make_pair(receives_[index].peer, receives_[index].step), index);
    }
    const auto [first, last] = index_.equal_range({source, step}); // oldest first
    const auto found = std::find_if(first, last, [&](const auto& each) { return fits(each.second); });
    return found == last ? std::nullopt : std::make_optional(found->second);
  }
  for (size_t index = 0; index < receives_.size(); ++index) {
    if (fits(index)) {
      return index;
    }
  }
  return std::nullopt;
}

void Operation::note_arrival(int source, size_t bytes) {
  auto& traffic = group_->traffic[source];
  ++traffic.received_messages;
  traffic.received_bytes += bytes;
  traffic.waited += times->arrive(source);
}

void Operation::on_confirm(int source) {
  const auto found = unconfirmed_.find(source);
  if (!ended() && found != unconfirmed_.end()) {
    unconfirmed_.erase(found);
    make_ready(shared_from_this());
  }
}

void Operation::on_progress() {
  moved_ = true;
  make_ready(shared_from_this());
}

Operation::Action Operation::step() {
  if (std::exchange(moved_, false)) {
    check_transfers();
  }
  for (size_t index = 0; waiting_ > 0 && index < receives_.size(); ++index) {
    if (receives_[index].waits) {
      take(index, nullptr);
    }
  }
  switch (std::exchange(task_, Task::kNone)) {
    case Task::kCompute:
      release_inputs();
      break;
    case Task::kMove:
      finish_moves();
      break;
    case Task::kNone:
      break;
  }
  going_.erase(std::remove_if(going_.begin(), going_.end(), [](const Going& going) { return going.data->done(); }), going_.end());
  if (plan_moves()) {
    task_ = Task::kMove;
    return Action::kCompute;
  }
  const auto action = advance();
  if (action == Action::kCompute) {
    task_ = Task::kCompute;
  }
  if (action == Action::kDone && (!going_.empty() || !unconfirmed_.empty())) {
    return Action::kWait;
  }
  return action;
}

void Operation::finish(std::exception_ptr error) {
  if (!error && epilogue_) {
    try {
      epilogue_();
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (!error && has_outputs_) {
    work_->set_outputs(std::move(outputs_));
  }
  // The tensors are released with the operation: after a failure the transport may still read or write them, and the last
  // reference to a tensor that Python knows takes Python's lock.
  work_->complete(std::move(error));
}

// The transfers of an operation: sending, reading in place, and copying data to its destination.

void Operation::send(
    c10::ArrayRef<Destination> destinations, uint16_t step, const void* data, size_t bytes, bool confirm, Memory memory) {
  if (destinations.empty()) {
    return;
  }
  c10::SmallVector<Transport::Destination, 8> peers;
  for (const auto& [peer, scale, only_sender] : destinations) {
    group_->check_present(peer);
    peers.push_back({group_->members[peer].peer_id, scale, confirm && confirm_, only_sender});
  }
  Transport::Sent sent;
  try {
    sent = group_->transport->send(peers, header_for(step, bytes), data, memory, shared_from_this());
    group_->sent_messages += peers.size();
    group_->sent_bytes += peers.size() * bytes;
    if (times) {
      for (const auto& destination : destinations) {
        auto& traffic = group_->traffic[destination.peer];
        ++traffic.sent_messages;
        traffic.sent_bytes += bytes;
      }
    }
  } catch (const Unreachable& error) {
    const auto lost = std::find_if(destinations.begin(), destinations.end(), [&](const Destination& destination) {
      return group_->members[destination.peer].peer_id == error.peer();
    });
    C10_THROW_ERROR(DistBackendError, group_->describe_member(lost->peer) + ' ' + error.what());
  }
  for (size_t i = 0; i < destinations.size(); ++i) {
    const bool answered = std::find(sent.answered.begin(), sent.answered.end(), peers[i].peer) != sent.answered.end();
    if (peers[i].wants_confirm && !answered) {
      unconfirmed_.insert(destinations[i].peer);
    }
  }
  if (sent.outgoing) {
    Going going{std::move(sent.outgoing), {}, static_cast<const char*>(data), bytes};
    for (const auto& destination : destinations) {
      going.peers.push_back(destination.peer);
    }
    going_.push_back(std::move(going));
    make_ready(shared_from_this());
  }
}

std::vector<Operation::Destination> Operation::destinations_at(const std::vector<int>& ranks) {
  std::vector<Destination> destinations;
  for (const int rank : ranks) {
    destinations.push_back({rank});
  }
  return destinations;
}

size_t Operation::sent(size_t bytes) const {
  for (const auto& going : going_) {
    bytes = std::min(bytes, going.data->sent());
  }
  return bytes;
}

// Returns whether peers may still read some of this memory.
bool Operation::is_sending(const void* memory, size_t bytes) const {
  const auto* begin = static_cast<const char*>(memory);
  return std::any_of(going_.begin(), going_.end(), [&](const Going& going) {
    return begin < going.memory + going.bytes && going.memory < begin + bytes && !going.data->done();
  });
}

size_t Operation::receive(int peer, uint16_t step, void* data, size_t bytes) {
  const auto index = receive_header(peer, step);
  receives_[index].data = data;
  receives_[index].bytes = bytes;
  receives_[index].any_size = false;
  return index;
}

size_t Operation::receive_input(int peer, uint16_t step, size_t bytes) {
  const auto index = receive(peer, step, nullptr, bytes);
  receives_[index].in_place = true;
  return index;
}

size_t Operation::receive_header(int peer, uint16_t step) {
  if (receiving_.size() <= step) {
    receiving_.resize(step + size_t(1), 0);
  }
  ++receiving_[step];
  Receive expected;
  expected.peer = peer;
  expected.step = step;
  receives_.push_back(std::move(expected));
  return receives_.size() - 1;
}

void Operation::fetch(size_t index, void* data) {
  auto& receive = receives_[index];
  receive.data = data;
  ++receiving_[receive.step];
  receive.complete = false;
  take(index, receive.stash.empty() ? nullptr : receive.stash.data());
}

bool Operation::received(uint16_t step) const {
  return step >= receiving_.size() || receiving_[step] == 0;
}

bool Operation::received_all() const {
  return std::all_of(receiving_.begin(), receiving_.end(), [](size_t count) { return count == 0; });
}

void* Operation::scratch(size_t bytes) {
  scratch_.push_back(shared_allocator().allocate(std::max<size_t>(bytes, 1)));
  return scratch_.back().get();
}

void Operation::complete_receive(Receive& receive) {
  receive.complete = true;
  --receiving_[receive.step];
  make_ready(shared_from_this());
}

// Brings the data of an arrived message to its destination, or finds where it can be read.
void Operation::take(size_t index, const char* data) {
  auto& receive = receives_[index];
  const auto& header = receive.header;
  if (header.delivery == Delivery::kInline) {
    if (receive.in_place) {
      receive.stash.assign(data, data + header.bytes);
      receive.input.data = receive.stash.data();
    } else {
      copy_bytes(receive.data, data, header.bytes);
    }
    complete_receive(receive);
    return;
  }
  // Nothing may be received into memory that is still being sent: on_progress() continues later.
  const bool waited = std::exchange(
      receive.waits, header.delivery == Delivery::kPayload && !receive.in_place && is_sending(receive.data, header.bytes));
  waiting_ += (receive.waits ? 1 : 0) - (waited ? 1 : 0);
  if (receive.waits) {
    return;
  }
  try {
    receive.incoming = group_->transport->receive(
        group_->members[receive.peer].peer_id, header, receive.in_place ? nullptr : receive.data, shared_from_this());
  } catch (const Unreachable& error) {
    C10_THROW_ERROR(DistBackendError, group_->describe_member(receive.peer) + ' ' + error.what());
  }
  if (!receive.in_place) {
    to_move_.push_back(index);
  }
  make_ready(shared_from_this());
}

// Tells the sender that the first `taken` bytes have been read.
void Operation::tell_taken(Receive& receive, size_t taken) {
  receive.taken = taken;
  if (receive.incoming && !receive.incoming->take(taken)) {
    C10_THROW_ERROR(
        DistBackendError, group_->describe_member(receive.peer) + " has given up this operation while its data was being read");
  }
}

// Small enough for both sides to work at the same time soon, large enough to keep the number of messages low.
size_t Operation::step_bytes(size_t bytes) {
  return std::clamp(bytes / 8 & ~size_t(63), size_t(32) << 10, size_t(256) << 10);
}

void Operation::check_transfers() const {
  for (const auto& going : going_) {
    if (!going.data->error.empty()) {
      const auto lost = std::find_if(
          going.peers.begin(), going.peers.end(), [&](int peer) { return group_->members[peer].peer_id == going.data->failed_peer; });
      C10_THROW_ERROR(DistBackendError, c10::str("failed to send to ", group_->describe_member(*lost), ": ", going.data->error));
    }
  }
}

// Finds the copies that run() can do now; returns whether there are any.
bool Operation::plan_moves() {
  moves_.clear();
  for (const auto& going : going_) {
    if (const auto fill = going.data->next_fill()) {
      moves_.push_back({going.data, *fill, 0, {}});
    }
  }
  for (size_t i = 0; i < to_move_.size();) {
    auto& receive = receives_[to_move_[i]];
    const size_t available = receive.incoming->available();
    if (receive.incoming->in_place()) {
      if (available == receive.header.bytes) {
        to_move_.erase(to_move_.begin() + static_cast<ptrdiff_t>(i));
        complete_receive(receive);
      } else {
        ++i;
      }
      continue;
    }
    // Of data that arrives in parts, copy a part, so that its sender can continue; otherwise copy all.
    const bool whole = receive.taken == 0 && available == receive.header.bytes && receive.header.delivery == Delivery::kMapped;
    const size_t to = whole ? available : std::min(available, receive.taken + step_bytes(receive.header.bytes));
    if (to > receive.taken) {
      Move move{nullptr, {}, to_move_[i], {}};
      receive.incoming->read(receive.taken, to, move.blocks);
      moves_.push_back(std::move(move));
    }
    ++i;
  }
  return !moves_.empty();
}

void Operation::settle() {
  for (auto& move : moves_) {
    if (move.outgoing) {
      move.outgoing->filled(move.fill);
    }
  }
}

void Operation::finish_moves() {
  for (const auto& move : std::exchange(moves_, {})) {
    if (move.outgoing) {
      continue; // settle() has told the transport
    }
    auto& receive = receives_[move.receive];
    tell_taken(receive, move.blocks.back().end);
    if (receive.taken == receive.header.bytes) {
      to_move_.erase(std::find(to_move_.begin(), to_move_.end(), move.receive));
      complete_receive(receive);
    }
  }
}

Operation::Action Operation::use_inputs(size_t bytes, size_t limit) {
  usable_ = std::min(bytes, limit);
  for (const auto& receive : receives_) {
    if (receive.in_place && receive.step == input_step_) {
      if (!receive.arrived) {
        return Action::kWait;
      }
      if (!receive.complete) {
        const size_t available = receive.incoming->available();
        usable_ = std::min(usable_, available == bytes && used_ == 0 ? available : std::min(available, used_ + step_bytes(bytes)));
      }
    }
  }
  if (usable_ < bytes) {
    usable_ &= ~size_t(63); // whole elements: a connection may deliver a part of one
  }
  if (usable_ <= used_) {
    return used_ == bytes ? Action::kDone : Action::kWait;
  }
  for (auto& receive : receives_) {
    if (receive.in_place && receive.step == input_step_ && !receive.complete) {
      receive.input.blocks.clear();
      receive.incoming->read(used_, usable_, receive.input.blocks);
    }
  }
  return Action::kCompute;
}

// Called after compute(): the senders may use their memory again, or fill it with more data.
void Operation::release_inputs() {
  used_ = std::max(used_, usable_);
  for (auto& receive : receives_) {
    if (!receive.in_place || receive.step != input_step_ || receive.complete || receive.taken == used_) {
      continue;
    }
    tell_taken(receive, used_);
    if (used_ == receive.header.bytes) {
      complete_receive(receive);
    }
  }
}

void Operation::run() {
  if (task_ == Task::kCompute) {
    compute();
    return;
  }
  for (const auto& move : moves_) {
    if (move.outgoing) {
      copy_far(move.fill.to, move.fill.from, move.fill.bytes);
      continue;
    }
    const auto& receive = receives_[move.receive];
    for (const auto& block : move.blocks) {
      copy_result(static_cast<char*>(receive.data) + block.begin, block.data, block.end - block.begin, receive.header.bytes);
    }
  }
}

void Operation::announce_to(int peer) {
  if (confirm_) {
    send(peer, kAnnouncement, nullptr, 0);
  }
}

void Operation::expect_announcement(int peer) {
  if (confirm_) {
    receive(peer, kAnnouncement, nullptr, 0);
  }
}

void Operation::confirm_to(int peer) {
  if (group_->gone.count(peer) > 0) {
    return;
  }
  Header header;
  header.kind = MessageKind::kConfirm;
  header.group = group_->id;
  header.operation.key = key_;
  header.operation.signature = signature_;
  try {
    group_->transport->send(group_->members[peer].peer_id, header);
    ++group_->sent_messages;
  } catch (const Unreachable&) { // the peer does not wait for it
  }
}

} // namespace fog
