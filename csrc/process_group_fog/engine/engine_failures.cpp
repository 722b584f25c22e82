// The engine's handling of failures: of operations, of other processes, and of timeouts.
#include <algorithm>

#include <c10/util/StringUtil.h>

#include "engine/engine.hpp"
#include "core/failure.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

// In groups of up to this size, the rank that fails tells all other ranks itself.
constexpr int kToldDirectly = 16;

} // namespace

bool Engine::is_away(const Group& group, int rank) const {
  return group.gone.count(rank) > 0 || !peers()[group.members[rank].peer_id].is_alive();
}

void Engine::tell_all_closed(const Group& group) {
  Header header;
  header.kind = MessageKind::kClosed;
  header.group = group.id;
  for (int peer = 0; peer < group.size(); ++peer) {
    const int peer_id = group.members[peer].peer_id;
    // A peer that has never communicated with this rank does not wait for it, or is told when it sends a message.
    if (peer != group.rank && hears_of_end(peer_id)) {
      send_quietly(peer_id, header);
    }
  }
}

// A rank that fails a large group, or hears of the failure, tells the members at distances 1, 2, 4, ... behind it: each
// rank sends about log2(n) messages, and all ranks know after about log2(n) steps. Each member is told by as many
// others, so members that are dead or stuck without being noticed delay the news for no other member. If a member is
// known to be away, the next present member is told instead, so the steps of distance 1 still reach all present
// members.
void Engine::spread_news(Group& group) {
  auto& news = *group.news;
  const int size = group.size();
  const bool direct = size <= kToldDirectly;
  if (direct && news.origin != group.rank) {
    return;
  }
  Header header;
  header.kind = MessageKind::kError;
  header.group = group.id;
  header.failed_rank = news.origin;
  header.bytes = std::min(news.text.size(), Transport::kInlineBytes);
  for (int distance = 1; distance < size; distance = direct ? distance + 1 : 2 * distance) {
    for (int behind = distance; behind < size; ++behind) {
      const int peer = (group.rank + behind) % size;
      if (is_away(group, peer)) {
        continue;
      }
      if (!news.told.insert(peer).second) {
        break;
      }
      try {
        transport_->send(group.members[peer].peer_id, header, news.text.data());
        break;
      } catch (const std::exception&) { // this member cannot be told; try the next one
      }
    }
  }
}

bool Engine::hears_of_end(int peer_id) const {
  return transport_->shares_memory(peer_id) || transport_->has_spoken_with(peer_id);
}

void Engine::fail(const std::shared_ptr<Group>& group, c10d::ErrorType type, const std::string& reason, bool tell) {
  try {
    fail_now(group, type, reason, tell);
  } catch (const std::exception&) { // no memory
    failing_ = true;
  }
}

void Engine::fail(const std::shared_ptr<Operation>& operation, const std::exception& error) {
  try {
    fail_now(operation->group(), c10d::ErrorType::COMM_ERROR, operation->describe() + ": " + message_of(error), true);
  } catch (const std::exception&) {
    failing_ = true;
  }
}

void Engine::fail_everything(const std::string& reason, bool tell) {
  failing_ = true;
  const auto groups = groups_;
  for (const auto& [id, group] : groups) {
    fail_now(group, c10d::ErrorType::COMM_ERROR, reason, tell);
  }
  service_->fail_all(reason);
  failing_ = false;
}

void Engine::fail_now(const std::shared_ptr<Group>& group, c10d::ErrorType type, const std::string& reason, bool tell) {
  if (!group->failure.reason.empty() && group->operations.empty()) {
    return;
  }
  if (tell && !group->news) {
    group->news = Group::News{group->rank, reason, {}};
  }
  if (group->news && transport_ && !group->closed) {
    spread_news(*group);
  }
  // Each operation's error names that operation. Later operations are refused with the text of the first one.
  auto text = [&](const Operation& operation) {
    const auto own = operation.describe();
    const auto whole = reason.compare(0, own.size(), own) == 0 ? reason : own + ": " + reason;
    // MPI does not always say which rank it waits for.
    return watchdog_.broken() && !operation.awaited().empty() ? whole + operation.describe_awaited() : whole;
  };
  const auto operations = group->operations;
  const auto first = std::min_element(
      operations.begin(), operations.end(), [](const auto& one, const auto& other) { return one->sequence() < other->sequence(); });
  if (group->failure.reason.empty()) { // otherwise an earlier attempt ran out of memory
    group->failure = {type, first == operations.end() ? reason : text(**first)};
  }
  for (const auto& operation : operations) {
    keep_watching(*operation);
    complete(operation, backend_error("fog: " + text(*operation)));
  }
  ignore_early(*group);
  if (transport_) {
    transport_->withdraw_group(group->id);
  }
  for (const auto& receive : group->posted) {
    outbox_.retired.push_back(receive);
  }
  group->posted.clear();
}

void Engine::ignore_early(Group& group) {
  auto ignored = std::exchange(group.unexpected, {});
  for (auto& [key, messages] : std::exchange(group.early, {})) {
    ignored.splice(ignored.end(), messages);
  }
  for (const auto& message : ignored) {
    transport_->ignore(group.members[message.source].peer_id, message.header);
  }
}

void Engine::tell_early_load() {
  for (const auto& [peer_id, hold] : early_load_.take_changes()) {
    Header header;
    header.kind = hold ? MessageKind::kHold : MessageKind::kRelease;
    send_quietly(peer_id, header);
  }
}

void Engine::lose(int peer_id, const std::string& how, bool announced) {
  if (announced) {
    FlightRecord::note_lost(peer_id);
  }
  const auto closed = closed_groups_;
  for (const auto& [id, ranks] : closed) {
    forget_closed(id, peer_id);
  }
  if (!peers()[peer_id].is_silent()) {
    outbox_.ended.push_back(peer_id);
  }
  const auto groups = groups_;
  for (const auto& [id, group] : groups) {
    const int peer = group->group_rank(peer_id);
    if (peer < 0) {
      continue;
    }
    const bool was_there = group->gone.emplace(peer, how).second; // it had not destroyed its group
    service_->on_gone(*group, peer, how);
    if (announced && was_there) {
      tell_of_loss(*group, peer, how);
    }
    if (group->news && transport_ && !group->closed) { // the peer may not have passed the news on
      spread_news(*group);
    }
    fail_awaiting(group, peer, group->describe_member(peer) + " " + how + " while this rank waits for it", announced);
  }
}

void Engine::tell_of_loss(Group& group, int rank, const std::string& how) {
  if (group.when_lost && !stopping_) { // a pool that has stopped would call it here, under the lock
    const auto which = group.describe_member(rank) + " " + how;
    completions_.run([call = std::exchange(group.when_lost, nullptr), which] { call(which); }, Refused::kQueue);
  }
}

void Engine::fail_awaiting(const std::shared_ptr<Group>& group, int peer, const std::string& reason, bool announced) {
  for (const auto& operation : group->operations) {
    if (operation->awaited(announced).count(peer) > 0) {
      fail(group, c10d::ErrorType::REMOTE_ERROR, operation->describe() + ": " + reason);
      return; // fail() has emptied the set
    }
  }
}

void Engine::check_peers(Lock& lock) {
  if (transport_) {
    const auto all = transport_->ended();
    look_for_expulsions();
    for (const auto& ended : all) {
      on_process_end(lock, ended);
    }
  }
}

void Engine::on_process_end(Lock& lock, const Transport::Ended& ended) {
  const int peer = ended.peer;
  if (peers()[peer].is_silent()) {
    on_end_of_lost(peer);
    return;
  }
  if (!peers()[peer].is_alive()) { // the system and a connection may both tell of it
    return;
  }
  // Take the messages that it sent before its end: it may have said goodbye, or sent all the awaited data.
  for (int empty = 0; empty < 3;) {
    try {
      empty = transport_ && transport_->poll() ? 0 : empty + 1;
    } catch (const std::exception&) {
      break;
    }
    step_ready(lock);
  }
  if (ended.state != Peer::State::kLeft) {
    declare_lost(peer, ended.state, ended.how);
  } else if (peers_.become(peer, ended.state)) { // without a goodbye, because the two never communicated
    lose(peer, kEnded, false);
  }
}

void Engine::watch_awaited(Operation& operation, Deadline now) {
  // Most operations end sooner, and then there is no need to find out which ranks they wait for.
  constexpr auto kInterval = std::chrono::milliseconds(50);
  if (operation.watched == Deadline()) {
    operation.watched = now;
  }
  if (transport_ && now >= operation.watched + kInterval) {
    operation.watched = now;
    for (const int peer : operation.awaited()) {
      const int peer_id = operation.group()->members[peer].peer_id;
      transport_->watch(peer_id);
      watch_program(operation, peer_id, now);
    }
  }
}

void Engine::check_deadlines() {
  const auto now = Clock::now();
  auto earliest = service_->check_deadlines(now);
  auto oldest = Deadline::max(); // the begin of an operation in flight
  if (in_flight_ == 0) {
    pulse_.load()->oldest = 0;
    watchdog_.set_deadline(earliest);
    return;
  }
  const auto groups = groups_;
  for (const auto& [id, group] : groups) {
    for (const auto& operation : group->operations) {
      oldest = std::min(oldest, operation->deadline() - operation->timeout());
      if (now < operation->deadline() || operation->computing) {
        watch_awaited(*operation, now);
        ask_early(*operation, now);
        note_wait(*operation, now);
        earliest = std::min(earliest, operation->deadline());
        continue;
      }
      if (inquire(operation, now)) {
        earliest = std::min(earliest, operation->inquiry->end());
        continue;
      }
      fail(
          group, c10d::ErrorType::TIMEOUT,
          c10::str(
              operation->describe(), " timed out: its timeout of ", operation->timeout().count(), " ms is over",
              operation->describe_awaited()));
      break; // fail() has emptied the set
    }
  }
  pulse_.load()->oldest = std::min(oldest, now).time_since_epoch().count();
  watchdog_.set_deadline(earliest);
}

} // namespace fog
