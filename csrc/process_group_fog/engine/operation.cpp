#include "engine/operation.hpp"

#include <algorithm>
#include <cstring>
#include <sstream>

#include <c10/util/Exception.h>

#include "core/copy.hpp"
#include "transport/shared_memory/shared_tensors.hpp"
#include "engine/group.hpp"

namespace fog {
namespace {

// "rank 2", "ranks 0, 3"
std::string ranks(const std::set<int>& numbers) {
  std::string text = numbers.size() == 1 ? "rank " : "ranks ";
  for (const int number : numbers) {
    text += (number == *numbers.begin() ? "" : ", ") + std::to_string(number);
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

bool Operation::one_host() const {
  return group_->one_host;
}

bool Operation::heard_from(int peer) const {
  return std::any_of(
      receives_.begin(), receives_.end(), [peer](const Receive& receive) { return receive.arrived && receive.peer == peer; });
}

bool Operation::expects(int peer) const {
  return std::any_of(
      receives_.begin(), receives_.end(), [peer](const Receive& receive) { return !receive.arrived && receive.peer == peer; });
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
  return (absent.empty() ? "" : "; not there: " + ranks(absent)) + (others.empty() ? "" : "; waiting for " + ranks(others));
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
  header.step = step;
  header.use = use_.number;
  header.generation = use_.generation;
  header.group = group_->id;
  header.key = key_;
  header.bytes = bytes;
  header.signature = signature_;
  return header;
}

std::vector<Operation::Destination> Operation::others() const {
  std::vector<Destination> others;
  for (int distance = 1; distance < size(); ++distance) {
    others.push_back({(rank() + distance) % size()});
  }
  return others;
}

void Operation::send(
    const std::vector<Destination>& destinations, uint16_t step, const void* data, size_t bytes, bool confirm, Memory memory) {
  if (destinations.empty()) {
    return;
  }
  std::vector<Transport::Destination> peers;
  peers.reserve(destinations.size());
  for (const auto& [peer, scale] : destinations) {
    group_->check_present(peer);
    peers.push_back({group_->members[peer].peer_id, scale, confirm && confirm_});
  }
  Transport::Sent sent;
  try {
    sent = group_->transport->send(peers, header_for(step, bytes), data, memory, shared_from_this());
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
    Going going{std::move(sent.outgoing), {}, step};
    for (const auto& destination : destinations) {
      going.peers.push_back(destination.peer);
    }
    going_.push_back(std::move(going));
    make_ready(shared_from_this());
  }
}

size_t Operation::sent(size_t bytes) const {
  for (const auto& going : going_) {
    bytes = std::min(bytes, going.data->sent());
  }
  return bytes;
}

bool Operation::is_sending(int peer, uint16_t step) const {
  return std::any_of(going_.begin(), going_.end(), [&](const Going& going) {
    return going.step == step && std::find(going.peers.begin(), going.peers.end(), peer) != going.peers.end() &&
        !going.data->done(group_->members[peer].peer_id);
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

void* Operation::scratch(size_t bytes) {
  scratch_.push_back(shared_allocator().allocate(std::max<size_t>(bytes, 1)));
  return scratch_.back().get();
}

void Operation::complete_receive(Receive& receive) {
  receive.complete = true;
  --receiving_[receive.step];
  make_ready(shared_from_this());
}

// Brings the data of an arrived message to its place, or finds where it can be read.
void Operation::take(size_t index, const char* data) {
  auto& receive = receives_[index];
  const auto& header = receive.header;
  if (header.delivery == Delivery::kInline) {
    if (receive.in_place) {
      receive.data = scratch(header.bytes);
      receive.input.data = receive.data;
    }
    if (header.bytes > 0) {
      std::memcpy(receive.data, data, header.bytes);
    }
    complete_receive(receive);
    return;
  }
  // MPI must not be asked to write to what it still reads: on_progress() goes on.
  receive.waits = header.delivery == Delivery::kPayload && receive.over_sent && is_sending(receive.peer, 0);
  if (receive.waits) {
    return;
  }
  receive.incoming = group_->transport->receive(
      group_->members[receive.peer].peer_id, header, receive.in_place ? nullptr : receive.data, shared_from_this());
  if (!receive.in_place) {
    to_move_.push_back(index);
  }
  make_ready(shared_from_this());
}

// Tells the sender that `taken` bytes of what it sends have been read.
void Operation::tell_taken(Receive& receive, size_t taken) {
  receive.taken = taken;
  if (receive.incoming && !receive.incoming->take(taken)) {
    C10_THROW_ERROR(
        DistBackendError, group_->describe_member(receive.peer) + " has given up this operation while its data was being read");
  }
}

// Small enough that both sides soon work at once, large enough that telling costs little.
size_t Operation::step_bytes(size_t bytes) {
  return std::clamp(bytes / 8 & ~size_t(63), size_t(32) << 10, size_t(256) << 10);
}

void Operation::check_transfers() const {
  for (const auto& going : going_) {
    if (!going.data->error.empty()) {
      const auto lost = std::find_if(
          going.peers.begin(), going.peers.end(), [&](int peer) { return group_->members[peer].peer_id == going.data->failed_peer; });
      C10_THROW_ERROR(DistBackendError, c10::str("MPI failed to send to ", group_->describe_member(*lost), ": ", going.data->error));
    }
  }
  for (const auto& receive : receives_) {
    if (receive.incoming && !receive.incoming->error.empty()) {
      C10_THROW_ERROR(
          DistBackendError,
          c10::str("MPI failed to receive from ", group_->describe_member(receive.peer), ": ", receive.incoming->error));
    }
  }
}

// Finds what run() can copy now; false if that is nothing.
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
    // Of what comes bit by bit a part, so that its sender can go on; else all.
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
      continue; // settle() has told
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

// After compute(): the senders may have their memory back, or fill it again.
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

void Operation::on_unmatched(int source, const Header& header) {
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(
          "got a message from rank ", source, " that it does not expect: rank ", source, " called ", header.signature.describe(),
          " and has this rank among those it sends to; this rank does not receive from it"));
}

void Operation::on_message(int source, const Header& header, const char* data) {
  if (ended()) {
    return;
  }
  if (!signature_.agrees_with(header.signature)) {
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            "ranks disagree: this rank called ", signature_.describe(), ", rank ", source, " called ", header.signature.describe()));
  }
  for (size_t index = 0; index < receives_.size(); ++index) {
    auto& receive = receives_[index];
    if (receive.arrived || receive.step != header.step || (receive.peer != source && receive.peer != -1)) {
      continue;
    }
    if (!receive.any_size && receive.bytes != header.bytes) {
      C10_THROW_ERROR(
          DistBackendError,
          c10::str(
              "ranks disagree: this rank expects ", receive.bytes, " bytes from rank ", source, ", which sends ", header.bytes, " (",
              header.signature.describe(), ")"));
    }
    receive.arrived = true;
    receive.peer = source;
    receive.header = header;
    if (header.wants_confirm != 0) {
      confirm_to(source);
    }
    if (receive.any_size) {
      if (header.delivery == Delivery::kInline) {
        receive.stash.assign(data, data + header.bytes);
      }
      complete_receive(receive);
    } else {
      take(index, data);
    }
    return;
  }
  on_unmatched(source, header);
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
  header.key = key_;
  header.signature = signature_;
  try {
    group_->transport->send(group_->members[peer].peer_id, header);
  } catch (const Unreachable&) { // nobody waits for it
  }
}

void Operation::on_confirm(int source) {
  const auto found = unconfirmed_.find(source);
  if (!ended() && found != unconfirmed_.end()) {
    unconfirmed_.erase(found);
    make_ready(shared_from_this());
  }
}

void Operation::on_progress() {
  make_ready(shared_from_this());
}

Operation::Action Operation::step() {
  check_transfers();
  for (size_t index = 0; index < receives_.size(); ++index) {
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
  epilogue_ = nullptr;
  if (error == nullptr) {
    kept_.clear();
  } // after a failure MPI may still read or write them; they go with the operation
  auto work = std::move(work_);
  work->complete(std::move(error));
}

} // namespace fog
