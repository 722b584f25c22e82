#include "engine/operation.hpp"

#include <algorithm>
#include <cstring>
#include <sstream>

#include <c10/util/Exception.h>

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
  sending_.assign(group->size(), 0);
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
  for (size_t peer = 0; announced && peer < sending_.size(); ++peer) {
    if (sending_[peer] > 0) {
      peers.insert(static_cast<int>(peer));
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
  auto& messenger = *group_->messenger;
  auto header = header_for(step, bytes);
  std::vector<int> world_ranks;
  std::vector<int> readers;
  for (const auto& [peer, scale] : destinations) {
    group_->check_present(peer);
    world_ranks.push_back(group_->members[peer].world_rank);
    const int destination = world_ranks.back();
    if (messenger.streams_to(destination) &&
        (memory == Memory::kOverwritten || !messenger.local().mapped_by(destination, data, bytes))) {
      readers.push_back(destination);
    }
  }
  const auto stream = messenger.open_stream(readers, group_->id, data, bytes, shared_from_this());
  if (stream) {
    streams_.push_back(stream);
    make_ready(shared_from_this());
  }
  // What comes with its header is copied at once, and may change from then on. Where it is to be held back it stands for that copy.
  const bool small = bytes > 0 && bytes <= Messenger::kInlineBytes;
  const bool held = small && std::any_of(world_ranks.begin(), world_ranks.end(), [&](int rank) { return messenger.holds_back(rank); });
  if (held ||
      (memory == Memory::kOverwritten && bytes > Messenger::kInlineBytes && (!stream || readers.size() < destinations.size()))) {
    auto* copy = scratch(bytes);
    std::memcpy(copy, data, bytes);
    data = copy;
  }
  for (size_t i = 0; i < destinations.size(); ++i) {
    const auto [peer, scale] = destinations[i];
    header.scale = scale;
    header.wants_confirm = 0;
    if (confirm && confirm_) {
      header.wants_confirm = 1;
      unconfirmed_.insert(peer);
    }
    size_t parts = 1;
    if (stream && std::find(readers.begin(), readers.end(), world_ranks[i]) != readers.end()) {
      messenger.announce(*stream, world_ranks[i], header);
    } else {
      Messenger::Sent sent;
      try {
        const auto token = kSendToken + static_cast<size_t>(peer) + (step == 0 ? 0 : kLaterToken);
        sent = messenger.send(world_ranks[i], header, data, shared_from_this(), token);
      } catch (const Unreachable& error) {
        C10_THROW_ERROR(DistBackendError, group_->describe_member(peer) + ' ' + error.what());
      }
      parts = sent.parts;
      for (auto& receive : receives_) {
        if (step == 0 && receive.over_sent && receive.peer == peer) {
          receive.unsent += parts;
        }
      }
      if (sent.answered && header.wants_confirm != 0) {
        unconfirmed_.erase(unconfirmed_.find(peer));
      }
    }
    sending_[peer] += parts;
    sends_ += parts;
  }
}

size_t Operation::sent(size_t bytes) const {
  for (const auto& stream : streams_) {
    bytes = std::min(bytes, stream->filled);
  }
  return bytes;
}

size_t Operation::receive(int peer, uint16_t step, void* data, size_t bytes) {
  const auto index = receive_header(peer, step);
  receives_[index].data = data;
  receives_[index].bytes = bytes;
  receives_[index].any_size = false;
  return index;
}

size_t Operation::receive_operand(int peer, uint16_t step, size_t bytes) {
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
  receive.available = receive.header.bytes;
  --receiving_[receive.step];
  make_ready(shared_from_this());
}

// Brings the data of an arrived message to its place, or finds where it can be read.
void Operation::take(size_t index, const char* data) {
  auto& receive = receives_[index];
  const auto& header = receive.header;
  const auto& member = group_->members[receive.peer];
  auto& messenger = *group_->messenger;
  const bool local = header.delivery != Delivery::kInline && header.delivery != Delivery::kPayload;
  if (header.delivery == Delivery::kOffer || header.delivery == Delivery::kMapped) {
    receive.operand = {reinterpret_cast<const void*>(header.address), member.pid, 0};
    receive.available = header.bytes;
    if (header.delivery == Delivery::kMapped) {
      receive.arena = messenger.local().arena_of(member.world_rank);
      if (const auto* memory = receive.arena ? receive.arena->at(header.address, header.bytes) : nullptr) {
        receive.operand = {memory, 0, 0};
      }
    }
  } else if (header.delivery == Delivery::kStream) {
    receive.operand = {messenger.local().window_of(member.world_rank, header.window), 0, shared_memory::Inbox::kWindowBytes};
    receive.available = 0;
    messenger.read_stream(member.world_rank, header, shared_from_this(), index);
  } else if (receive.in_place) {
    receive.data = scratch(header.bytes);
    receive.operand = {receive.data, 0, 0};
  }
  if (local) {
    if (!receive.in_place) {
      to_move_.push_back(index);
    }
    make_ready(shared_from_this());
  } else if (header.delivery == Delivery::kInline) {
    if (header.bytes > 0) {
      std::memcpy(receive.data, data, header.bytes);
    }
    complete_receive(receive);
  } else if (receive.waits = receive.unsent > 0; !receive.waits) { // else on_transfer() goes on
    receive.parts_missing = messenger.receive(member.world_rank, header, receive.data, shared_from_this(), index);
    receive.parts.assign(receive.parts_missing, false);
  }
}

// Tells the sender that `taken` bytes of what it streams or offers have been read.
void Operation::tell_taken(Receive& receive, size_t taken) {
  receive.taken = taken;
  const auto& header = receive.header;
  const int sender = group_->members[receive.peer].world_rank;
  auto& messenger = *group_->messenger;
  bool stands = true;
  if (header.delivery == Delivery::kStream) {
    stands = messenger.empty(sender, header, taken);
  } else if ((header.delivery == Delivery::kOffer || header.delivery == Delivery::kMapped) && taken == header.bytes) {
    stands = messenger.take(sender, header);
  }
  if (!stands) {
    C10_THROW_ERROR(
        DistBackendError, group_->describe_member(receive.peer) + " has given up this operation while its data was being read");
  }
}

// Parts small enough that both sides soon work at once, large enough that telling costs little.
size_t Operation::move_bytes(size_t bytes) {
  return std::clamp(bytes / 8 & ~size_t(63), size_t(32) << 10, size_t(256) << 10);
}

// Finds what run() can move now; false if that is nothing.
bool Operation::plan_moves() {
  moves_.clear();
  for (const auto& stream : std::vector<std::shared_ptr<Stream>>(streams_)) {
    if (stream->closed) { // all its readers have gone
      end_stream(stream);
      continue;
    }
    const size_t to = std::min(stream->limit(), stream->filled + move_bytes(stream->bytes));
    if (to > stream->filled) {
      group_->messenger->begin_filling(*stream);
      moves_.push_back({stream, 0, stream->filled, to});
    }
  }
  for (const auto index : to_move_) {
    const auto& receive = receives_[index];
    // Of a stream a part, so that its sender can go on; else all.
    const size_t most = receive.operand.window != 0 ? move_bytes(receive.header.bytes) : receive.header.bytes;
    const size_t to = std::min(receive.available, receive.taken + most);
    if (to > receive.taken) {
      moves_.push_back({nullptr, index, receive.taken, to});
    }
  }
  return !moves_.empty();
}

// Its data is not needed any more.
void Operation::end_stream(const std::shared_ptr<Stream>& stream) {
  for (const auto& reader : stream->readers) {
    --sending_[group_->group_rank(reader.rank)];
    --sends_;
  }
  streams_.erase(std::find(streams_.begin(), streams_.end(), stream));
}

void Operation::settle() {
  for (const auto& move : moves_) {
    if (move.outgoing) {
      group_->messenger->end_filling(*move.outgoing);
    }
  }
}

void Operation::finish_moves() {
  auto& messenger = *group_->messenger;
  for (const auto& move : std::exchange(moves_, {})) {
    if (move.outgoing) {
      messenger.fill(move.outgoing, move.to);
      if (move.to == move.outgoing->bytes) {
        end_stream(move.outgoing);
      }
      continue;
    }
    auto& receive = receives_[move.receive];
    tell_taken(receive, move.to);
    if (receive.taken == receive.header.bytes) {
      to_move_.erase(std::find(to_move_.begin(), to_move_.end(), move.receive));
      complete_receive(receive);
    }
  }
}

Operation::Action Operation::use_operands(size_t bytes, size_t limit) {
  usable_ = std::min(bytes, limit);
  for (const auto& receive : receives_) {
    if (receive.in_place && receive.step == operand_step_) {
      if (!receive.arrived) {
        return Action::kWait;
      }
      usable_ =
          std::min(usable_, receive.operand.window != 0 ? std::min(receive.available, used_ + move_bytes(bytes)) : receive.available);
    }
  }
  if (usable_ > used_) {
    return Action::kCompute;
  }
  return used_ == bytes ? Action::kDone : Action::kWait;
}

// After compute(): the senders may have their memory back, or fill it again.
void Operation::release_operands() {
  used_ = std::max(used_, usable_);
  for (auto& receive : receives_) {
    if (!receive.in_place || receive.step != operand_step_ || receive.complete || receive.taken == used_) {
      continue;
    }
    tell_taken(receive, used_);
    if (used_ == receive.header.bytes) {
      complete_receive(receive);
    }
  }
}

void Operation::run() {
  try {
    if (task_ == Task::kCompute) {
      compute();
      return;
    }
    for (const auto& move : moves_) {
      if (move.outgoing) {
        fill_window(
            move.outgoing->window, shared_memory::Inbox::kWindowBytes, move.from, move.outgoing->data + move.from, move.to - move.from);
      } else {
        const auto& receive = receives_[move.receive];
        read_operand(
            receive.operand, move.from, static_cast<char*>(receive.data) + move.from, move.to - move.from, receive.header.bytes);
      }
    }
  } catch (const UnreadableMemory& error) {
    for (int peer = 0; peer < size(); ++peer) {
      if (group_->members[peer].pid == error.pid && group_->members[peer].host == group_->members[rank()].host) {
        C10_THROW_ERROR(
            DistBackendError,
            group_->describe_member(peer) +
                (error.process_ended ? " was lost: its memory cannot be read: "
                                     : " has given up this operation, or its memory cannot be read: ") +
                error.what());
      }
    }
    throw;
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
    group_->messenger->send(group_->members[peer].world_rank, header, nullptr, nullptr, 0);
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

void Operation::on_transfer(size_t token, size_t part) {
  if (token >= kSendToken) {
    const int peer = peer_of(token);
    --sending_[peer];
    --sends_;
    for (size_t index = 0; token < kSendToken + kLaterToken && index < receives_.size(); ++index) {
      auto& receive = receives_[index];
      if (receive.over_sent && receive.peer == peer && --receive.unsent == 0 && receive.waits && !ended()) {
        take(index, nullptr);
      }
    }
    make_ready(shared_from_this());
    return;
  }
  auto& receive = receives_[token];
  receive.parts[part] = true;
  if (--receive.parts_missing == 0) {
    complete_receive(receive);
  } else if (receive.in_place) { // what has come without a gap can be used
    const auto gap = std::find(receive.parts.begin(), receive.parts.end(), false) - receive.parts.begin();
    receive.available = static_cast<size_t>(gap) * Messenger::part_bytes(receive.header.bytes);
    make_ready(shared_from_this());
  }
}

void Operation::on_transfer_error(size_t token, const std::string& reason) {
  const int peer = token >= kSendToken ? peer_of(token) : receives_[token].peer;
  transfer_error_ =
      c10::str("MPI failed to ", token >= kSendToken ? "send to " : "receive from ", group_->describe_member(peer), ": ", reason);
  make_ready(shared_from_this());
}

void Operation::on_room() {
  make_ready(shared_from_this());
}

void Operation::on_filled(size_t token, size_t filled) {
  receives_[token].available = filled;
  make_ready(shared_from_this());
}

Operation::Action Operation::step() {
  if (!transfer_error_.empty()) {
    C10_THROW_ERROR(DistBackendError, transfer_error_);
  }
  switch (std::exchange(task_, Task::kNone)) {
    case Task::kCompute:
      release_operands();
      break;
    case Task::kMove:
      finish_moves();
      break;
    case Task::kNone:
      break;
  }
  if (plan_moves()) {
    task_ = Task::kMove;
    return Action::kCompute;
  }
  const auto action = advance();
  if (action == Action::kCompute) {
    task_ = Task::kCompute;
  }
  if (action == Action::kDone && (sends_ > 0 || !unconfirmed_.empty())) {
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
