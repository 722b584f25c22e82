#include "engine/operation.hpp"

#include <algorithm>
#include <iterator>
#include <sstream>

#include <c10/util/Exception.h>

#include "engine/flight_record.hpp"
#include "engine/group.hpp"

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
  constexpr size_t kFew = 16; // up to this number a linear search is as fast
  const auto fits = [&](size_t index) {
    const auto& receive = receives_[index];
    return !receive.arrived && receive.step == step && (receive.peer == source || receive.peer == -1);
  };
  if (receives_.size() > kFew) { // no receive here is from any source: an operation with such a receive has only one
    index_.extend(receives_.size(), [&](size_t index) { return ReceiveIndex::key(receives_[index].peer, receives_[index].step); });
    return index_.find(ReceiveIndex::key(source, step), fits);
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

} // namespace fog
