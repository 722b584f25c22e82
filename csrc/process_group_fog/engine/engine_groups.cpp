// The engine's part in creating and closing groups.
#include <sched.h>

#include <algorithm>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "core/deadline.hpp"
#include "core/failure.hpp"
#include "core/signature.hpp"
#include "engine/engine.hpp"
#include "job/peer_information.hpp"

namespace fog {
namespace {

int available_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

} // namespace

std::shared_ptr<Group> Engine::add_group(
    uint64_t id, std::string name, int rank, std::vector<Member> members, const std::vector<std::string>& addresses) {
  auto group = std::make_shared<Group>(*this, id, std::move(name), rank, std::move(members));
  used_ = true;
  auto lock = locked();
  TORCH_CHECK(!stopping_, "fog: the interpreter is shutting down");
  group->ready = &ready_;
  if (group->size() > 1) {
    group->transport = transport_.get();
    groups_.emplace(id, group);
    int local = 0;
    for (int member = 0; member < group->size(); ++member) {
      const auto& peer = group->members[member];
      if (peer.host_id != group->members[rank].host_id) {
        continue;
      }
      ++local;
      if (member != rank && !addresses.empty()) {
        transport_->attach(peer.peer_id, peer.pid, addresses[member]);
      }
    }
    oversubscribed_ = oversubscribed_ || local > available_cores();
    auto early = std::move(early_[id]);
    early_.erase(id);
    for (const auto& message : early) {
      on_message(message.source, message.header, message.data.data());
    }
    for (int member = 0; member < group->size(); ++member) { // members that ended while the group was being created
      const auto& its = peers()[group->members[member].peer_id];
      if (!its.is_alive()) {
        group->gone.emplace(member, its.is_silent() ? kNoSign : its.is_lost() ? kLost : kEnded);
      }
    }
  }
  unlock_and_deliver(lock);
  return group;
}

std::shared_ptr<Group> Engine::add_part(const Group& whole, uint64_t number, std::string name, const std::vector<int>& ranks) {
  auto id = hash_more(hash_more(kEmptyHash, static_cast<int64_t>(whole.id)), static_cast<int64_t>(number));
  std::unordered_map<std::string, int> hosts;
  std::vector<Member> members;
  auto lock = locked();
  for (const int rank : ranks) {
    // A rank that came later is known since it was admitted.
    const auto& own = whole.members[whole.rank];
    auto member = rank < whole.size() ? whole.members[rank] : Member{rank, 0, own.host, own.host_id, own.host_name};
    id = hash_more(id, static_cast<int64_t>(member.peer_id));
    if (const auto joined = admitted_.find(member.peer_id); joined != admitted_.end()) {
      member = joined->second;
    }
    member.host = hosts.emplace(member.host_id, static_cast<int>(hosts.size())).first->second;
    members.push_back(std::move(member));
  }
  lock.unlock();
  const auto mine = std::find(ranks.begin(), ranks.end(), whole.rank);
  // The members are known since `whole` was created, or since they have joined.
  return add_group(id, std::move(name), static_cast<int>(mine - ranks.begin()), std::move(members), {});
}

void Engine::admit(int peer_id, const PeerInformation& peer, bool is_here) {
  auto lock = locked();
  check_peers(lock);
  const auto its = peers()[peer_id];
  // A process that has this one's memory mapped must have ended, and the verdict of a rank does not suffice. One that
  // has only a connection is not heard any more.
  if ((its.is_silent() && transport_->shares_memory(peer_id)) || (its.is_alive() && transport_->knows(peer_id))) {
    C10_THROW_ERROR(
        DistBackendError, c10::str("fog: a process cannot take the place of world rank ", peer_id, ", whose process may still run"));
  }
  if (!its.is_alive()) {
    if (its.is_silent()) {
      on_end_of_lost(peer_id);
    }
    // Data of the process before it does not come any more, and the next one uses its tags anew.
    for (const auto& [id, group] : groups_) {
      const auto is_old = [rank = group->group_rank(peer_id)](const EarlyMessage& message) { return message.source == rank; };
      group->unexpected.remove_if(is_old);
      for (auto& [key, messages] : group->early) {
        messages.remove_if(is_old);
      }
    }
    transport_->renew(peer_id);
    peers_.become(peer_id, Peer::State::kAlive);
    released_by_.erase(peer_id);
    mail_.forget(peer_id);
    expelled_by_.erase(peer_id);
    liveness_.forget(peer_id);
    FlightRecord::note_lost(peer_id, false);
  }
  admitted_[peer_id] = {peer_id, peer.pid, 0, peer.host, peer.host_name};
  if (is_here) {
    transport_->attach(peer_id, peer.pid, peer.address);
  }
  if (!peer.tcp.empty()) {
    transport_->connect(peer_id, peer.tcp);
  }
  unlock_and_deliver(lock);
}

void Engine::give_up(int peer_id, Peer::State state, const std::string& how) {
  auto lock = locked();
  declare_lost(peer_id, state, how);
  unlock_and_deliver(lock);
}

bool Engine::is_connected_with(int peer_id) {
  look_for_ended_peers();
  const auto lock = locked();
  if (!peers()[peer_id].is_alive()) {
    throw Unreachable(peer_id);
  }
  return transport_->is_connected_with(peer_id);
}

void Engine::refuse_work(const std::shared_ptr<Group>& group, const std::string& reason) {
  auto lock = locked();
  fail(group, c10d::ErrorType::COMM_ERROR, reason, false);
  unlock_and_deliver(lock);
}

void Engine::abort(const std::shared_ptr<Group>& group, const std::string& reason) {
  auto lock = lock_by(deadline_after(kLeaveTimeout));
  if (!group->closed) {
    fail(group, c10d::ErrorType::COMM_ERROR, reason);
    if (transport_) { // it may have failed without news, or by those of a rank that others count as lost
      auto& news = group->news ? *group->news : group->news.emplace(Group::News{group->rank, group->failure.reason, {}});
      news.origin = group->rank;
      spread_news(*group);
    }
  }
  unlock_and_deliver(lock);
}

void Engine::close(const std::shared_ptr<Group>& group) {
  if (forked_) {
    return;
  }
  auto lock = lock_by(deadline_after(kLeaveTimeout));
  const auto calls = service_->on_closing(*group);
  lock.unlock();
  for (const auto& call : calls) {
    call();
  }
  lock.lock();
  if (!group->closed) {
    if (!group->operations.empty()) {
      fail(group, c10d::ErrorType::COMM_ERROR, "group '" + group->name + "' was destroyed while its operations were in flight");
    }
    if (group->size() > 1 && !stopping_) {
      tell_all_closed(*group); // also to the ranks that have closed the group: they can now forget it
    }
    group->closed = true;
    ignore_early(*group);
    service_->fail_group(*group, "the group was destroyed");
    groups_.erase(group->id);
    if (groups_.empty()) {
      mail_ = {};
    }
    for (int peer = 0; peer < group->size(); ++peer) {
      const int peer_id = group->members[peer].peer_id;
      if (peer != group->rank && !is_away(*group, peer) && hears_of_end(peer_id)) {
        closed_groups_[group->id].insert(peer_id);
      }
    }
    constexpr size_t kRemembered = 4096;
    if (group->size() > 1 && closed_lately_.insert(group->id).second) {
      closed_in_order_.push_back(group->id);
    }
    if (closed_in_order_.size() > kRemembered) {
      closed_lately_.erase(closed_in_order_.front());
      closed_in_order_.pop_front();
    }
  }
  unlock_and_deliver(lock);
}

void Engine::forget_closed(uint64_t group, int peer_id) {
  const auto found = closed_groups_.find(group);
  if (found != closed_groups_.end()) {
    found->second.erase(peer_id);
    if (found->second.empty()) {
      closed_groups_.erase(found);
    }
  }
}

Failure Engine::failure(const std::shared_ptr<Group>& group) {
  auto lock = locked();
  return group->failure;
}

void Engine::watch(const Group& group, const std::vector<int>& ranks) {
  auto lock = locked();
  for (const int rank : ranks) {
    if (transport_ && rank != group.rank) {
      transport_->watch(group.members[rank].peer_id);
    }
  }
}

std::string Engine::call_when_lost(const std::shared_ptr<Group>& group, std::function<void(const std::string& which)> function) {
  look_for_ended_peers();
  const auto lock = locked();
  if (group->closed) {
    return "";
  }
  group->when_lost = std::move(function);
  for (int rank = 0; rank < group->size(); ++rank) {
    const int peer_id = group->members[rank].peer_id;
    const auto gone = group->gone.find(rank);
    if (peers()[peer_id].is_lost() && gone != group->gone.end() && gone->second != kDestroyed) {
      return group->describe_member(rank) + " " + gone->second;
    }
    if (transport_ && rank != group->rank) {
      transport_->watch(peer_id);
    }
  }
  return "";
}

std::pair<uint64_t, uint64_t> Engine::sent(const std::shared_ptr<Group>& group) {
  auto lock = locked();
  return {group->sent_messages, group->sent_bytes};
}

uint64_t Engine::sequence(const std::shared_ptr<Group>& group) {
  auto lock = locked();
  return group->sequence;
}

} // namespace fog
