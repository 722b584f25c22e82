// How the engine deals with failures: of operations, of time, of other processes.
#include <algorithm>
#include <cstdio>

#include <c10/util/StringUtil.h>

#include "engine/engine.hpp"
#include "core/failure.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

} // namespace

void Engine::notify(const std::shared_ptr<Group>& group, MessageKind kind, const std::string& text) {
  Header header;
  header.kind = kind;
  header.group = group->id;
  header.bytes = std::min(text.size(), Transport::kInlineBytes);
  for (int peer = 0; peer < group->size(); ++peer) {
    const int peer_id = group->members[peer].peer_id;
    const bool closed = kind != MessageKind::kClosed && group->gone.count(peer) > 0;
    if (peer == group->rank || lost_.count(peer_id) > 0 || departed_.count(peer_id) > 0 || closed) {
      continue;
    }
    try {
      transport_->send(peer_id, header, text.data());
    } catch (const std::exception&) { // it cannot be told; its own time-out will
    }
  }
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
  if (tell && transport_ && !group->closed) {
    notify(group, MessageKind::kError, reason);
  }
  // Each operation's error names itself, and later ones are refused with the text of the first.
  auto text = [&](const Operation& operation) {
    const auto own = operation.describe();
    const auto whole = reason.compare(0, own.size(), own) == 0 ? reason : own + ": " + reason;
    // MPI does not always say for whom it waits.
    return watchdog_.broken() && !operation.awaited().empty() ? whole + operation.describe_awaited() : whole;
  };
  const auto operations = group->operations;
  const auto first = std::min_element(
      operations.begin(), operations.end(), [](const auto& one, const auto& other) { return one->sequence() < other->sequence(); });
  if (group->failure.reason.empty()) { // else it lacked memory the last time
    group->failure = {type, first == operations.end() ? reason : text(**first)};
  }
  for (const auto& operation : operations) {
    complete(operation, backend_error("fog: " + text(*operation)));
  }
  if (transport_) {
    transport_->withdraw_group(group->id);
  }
  for (const auto& receive : group->posted) {
    outbox_.retired.push_back(receive);
  }
  group->posted.clear();
  group->unexpected.clear();
  group->early.clear();
}

void Engine::tell_early_load() {
  for (const auto& [peer_id, hold] : early_load_.take_changes()) {
    if (lost_.count(peer_id) == 0 && departed_.count(peer_id) == 0) {
      Header header;
      header.kind = hold ? MessageKind::kHold : MessageKind::kRelease;
      try {
        transport_->send(peer_id, header);
      } catch (const std::exception&) { // it sends nothing any more, then
      }
    }
  }
}

void Engine::lose(int peer_id, const std::string& how, bool announced) {
  const auto closed = closed_groups_;
  for (const auto& [id, ranks] : closed) {
    forget_closed(id, peer_id);
  }
  if (silent_.count(peer_id) == 0) {
    outbox_.ended.push_back(peer_id);
  }
  const auto groups = groups_;
  for (const auto& [id, group] : groups) {
    const int peer = group->group_rank(peer_id);
    if (peer < 0) {
      continue;
    }
    group->gone.emplace(peer, how);
    service_->on_gone(*group, peer, how);
    fail_awaiting(group, peer, group->describe_member(peer) + " " + how + " while this rank waits for it", announced);
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
  const auto now = Clock::now();
  if (transport_) {
    for (const auto& [peer, silent, drain] : transport_->ended()) {
      released_by_.insert(peer);
      draining_.push_back({peer, silent, now + drain});
    }
  }
  for (size_t i = 0; i < draining_.size();) {
    const auto ended = draining_[i];
    if (now < ended.end) {
      ++i;
      continue;
    }
    draining_.erase(draining_.begin() + static_cast<ptrdiff_t>(i));
    on_process_end(lock, ended.peer, ended.silent);
  }
}

void Engine::on_process_end(Lock& lock, int peer, bool silent) {
  released_by_.insert(peer);
  if (departed_.count(peer) > 0) {
    return;
  }
  // What it sent before its end is still to be taken: it may have said goodbye, or sent all that is waited for.
  for (int empty = 0; empty < 3;) {
    try {
      empty = transport_ && transport_->poll() ? 0 : empty + 1;
    } catch (const std::exception&) {
      break;
    }
    step_ready(lock);
  }
  if (departed_.count(peer) > 0) {
    return;
  }
  unhealthy_ = true;
  lost_.insert(peer);
  if (silent) {
    silent_.insert(peer);
  }
  if (transport_) {
    transport_->forget(peer);
  }
  // Said here and not only in the exception: a launcher that sees the same death may end this process before it can
  // print a traceback.
  for (const auto& [id, group] : groups_) {
    const int rank = group->group_rank(peer);
    if (rank >= 0 && !group->closed) {
      std::fprintf(
          stderr, "fog: rank %d of group '%s': lost %s: %s\n", group->rank, group->name.c_str(), group->describe_member(rank).c_str(),
          silent ? "its host does not answer" : "its process ended");
      break;
    }
  }
  lose(peer, silent ? kSilent : kLost, true);
}

void Engine::check_deadlines() {
  const auto now = Clock::now();
  auto earliest = service_->check_deadlines(now);
  if (in_flight_ == 0) {
    watchdog_.set_deadline(earliest);
    return;
  }
  const auto groups = groups_;
  for (const auto& [id, group] : groups) {
    for (const auto& operation : group->operations) {
      if (now < operation->deadline() || operation->computing) {
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
      break; // fail() emptied the set
    }
  }
  watchdog_.set_deadline(earliest);
}

} // namespace fog
