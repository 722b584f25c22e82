// The engine's part in the judgement on peers that hang or are stopped: this process's signs of life, the verdicts, and
// the return of a process that others count as lost.
#include <algorithm>
#include <cstdio>

#include "core/failure.hpp"
#include "core/python_lock.hpp"
#include "engine/engine.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kJudgementInterval = std::chrono::milliseconds(50);
// After a longer pause, a call first looks whether ranks of other hosts count this one as lost. Their messages may lie
// behind data with which the operation would complete.
constexpr auto kLongPause = std::chrono::milliseconds(200);
// How long a peer stays watched after watch_awaited() or a window has said so.
constexpr auto kWatched = std::chrono::milliseconds(300);

} // namespace

void Engine::note_call() {
  if (forked_) { // the memory belongs to the parent
    return;
  }
  auto& pulse = *pulse_.load(std::memory_order_relaxed);
  pulse.calls.fetch_add(1, std::memory_order_relaxed);
  const auto now = Clock::now();
  const bool paused = now - gaps_.last() > kLongPause;
  if (const auto usual = gaps_.call(now)) {
    pulse.usual.store(usual->count(), std::memory_order_relaxed);
  }
  if (paused || pulse.lost_by.load(std::memory_order_acquire) != lost_by_seen_.load()) {
    without_python_lock([this] { look_for_ended_peers(); });
  }
}

void Engine::suspend_judgement(bool on) {
  if (forked_) {
    return;
  }
  const Lock lock(mutex_); // use() may replace the pulse
  auto& pulse = *pulse_.load();
  pulse.calls.fetch_add(1);
  gaps_.resume(Clock::now());
  pulse.suspended.fetch_add(on ? 1U : ~0U);
}

void Engine::set_lost_after(std::chrono::nanoseconds lost_after) {
  const auto lock = locked();
  liveness_.set_lost_after(lost_after);
}

std::chrono::nanoseconds Engine::lost_after() {
  const auto lock = locked();
  return liveness_.lost_after();
}

std::vector<int> Engine::ranks_that(const Group& group, const std::function<bool(int rank)>& holds) {
  look_for_ended_peers();
  const auto lock = locked();
  std::vector<int> ranks;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank != group.rank && holds(rank)) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

std::vector<int> Engine::lost_ranks(const Group& group) {
  return ranks_that(group, [&](int rank) { return peers()[group.members[rank].peer_id].is_lost(); });
}

std::vector<int> Engine::silent_ranks(const Group& group) {
  return ranks_that(group, [&](int rank) { return peers()[group.members[rank].peer_id].is_silent(); });
}

std::vector<int> Engine::left_ranks(const Group& group) {
  return ranks_that(group, [&](int rank) { return is_away(group, rank) && !peers()[group.members[rank].peer_id].is_lost(); });
}

std::vector<int> Engine::suspect_ranks(const Group& group) {
  return ranks_that(group, [&](int rank) { return liveness_.suspects(group.members[rank].peer_id); });
}

void Engine::watch_program(const Operation& operation, int peer_id, Deadline now) {
  liveness_.watch(peer_id, now + kWatched, !operation.patient());
}

void Engine::keep_watching(const Operation& operation) {
  const auto end = Clock::now() + 2 * liveness_.number();
  for (const int peer : operation.awaited()) {
    liveness_.watch(operation.group()->members[peer].peer_id, end, !operation.patient());
  }
}

void Engine::judge_peers(Deadline now) {
  if (!transport_ || now < next_judgement_) {
    return;
  }
  next_judgement_ = now + kJudgementInterval;
  for (const PeerId peer : service_->watched()) {
    liveness_.watch(peer, now + kWatched, true);
  }
  if (!liveness_.watches_any()) {
    return;
  }
  const auto& pulse = *pulse_.load();
  if (pulse.suspended.load() > 0) {
    return;
  }
  // If all programs pause, for example for an evaluation, nobody is late.
  const auto pause = std::max<std::chrono::nanoseconds>(liveness_.number() / 2, std::chrono::nanoseconds(pulse.usual.load()));
  const bool paused = pulse.waiting.load() == 0 && now - gaps_.last() > pause;
  // Signs from other hosts take messages, so they are only asked for if it is worth it.
  const auto read = [this](PeerId peer) -> std::optional<Signs> {
    const bool asks = liveness_.lost_after().count() > 0 || transport_->shares_memory(peer);
    return asks && peers()[peer].is_alive() ? transport_->signs_of(peer) : std::nullopt;
  };
  for (const auto& [peer, how] : liveness_.judge(now, paused, read)) {
    declare_lost(peer, Peer::State::kSilent, how);
  }
}

void Engine::declare_lost(int peer, Peer::State state, const std::string& how) {
  if (!peers_.become(peer, state)) {
    return;
  }
  unhealthy_ = true;
  liveness_.forget(peer);
  if (transport_ && peers()[peer].is_silent()) {
    transport_->expel(peer);
  }
  if (transport_) {
    transport_->forget(peer);
  }
  // Print this in addition to the exception: a launcher that notices the same death may end this process before it can
  // print a traceback.
  for (const auto& [id, group] : groups_) {
    const int rank = group->group_rank(peer);
    if (rank >= 0 && !group->closed) {
      std::fprintf(
          stderr, "fog: rank %d of group '%s': lost %s: %s\n", group->rank, group->name.c_str(), group->describe_member(rank).c_str(),
          how.substr(how.find(": ") + 2).c_str());
      break;
    }
  }
  lose(peer, how, true);
}

void Engine::on_end_of_lost(int peer) {
  peers_.become(peer, Peer::State::kLost);
  outbox_.ended.push_back(peer);
  for (const auto& [id, group] : groups_) {
    if (const int rank = group->group_rank(peer); rank >= 0) {
      service_->on_gone(*group, rank, kLost);
    }
  }
}

void Engine::look_for_expulsions() {
  const auto lost_by = pulse_.load()->lost_by.load(std::memory_order_acquire);
  for (const PeerId peer : transport_->expelled_by()) {
    const auto groups = groups_;
    for (const auto& [id, group] : groups) {
      const int rank = group->group_rank(peer);
      if (rank < 0 || group->closed) {
        continue;
      }
      const auto reason = group->describe_member(rank) +
          " counts this rank as lost, because this rank showed no sign of life for too long; it takes no further part in the group";
      std::fprintf(stderr, "fog: rank %d of group '%s': %s\n", group->rank, group->name.c_str(), reason.c_str());
      unhealthy_ = true; // the peer answers no goodbye
      fail(group, c10d::ErrorType::REMOTE_ERROR, reason, false);
      service_->on_expelled(*group, reason);
    }
  }
  lost_by_seen_ = lost_by; // not before: until now, note_call() waits for the lock
}

} // namespace fog
