// The engine's handling of received messages.
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "core/failure.hpp"
#include "engine/engine.hpp"

namespace fog {

void Engine::on_message(int source, const Header& header, const char* data) {
  // A process that was declared lost may still run; it only has to say what memory it does not use any more.
  if (peers()[source].is_silent() && (header.kind != MessageKind::kWindow || header.window.op != WindowOp::kLeave)) {
    transport_->ignore(source, header);
    return;
  }
  if (header.kind == MessageKind::kGoodbye) {
    if (header.wants_confirm != 0) {
      Header taken;
      taken.kind = MessageKind::kGoodbyeTaken;
      send_quietly(source, taken);
    }
    if (peers_.become(source, Peer::State::kLeft)) {
      afterwards_.emplace_back([this, source] { lose(source, kEnded, false); });
    }
    return;
  }
  if (header.kind == MessageKind::kHold || header.kind == MessageKind::kRelease) {
    transport_->hold_back(source, header.kind == MessageKind::kHold);
    return;
  }
  if (header.kind == MessageKind::kGoodbyeTaken) {
    released_by_.insert(source);
    return;
  }
  if (header.kind == MessageKind::kMembership) {
    on_membership(source, header, data);
    return;
  }
  const auto found = groups_.find(header.group);
  if (found == groups_.end()) {
    const auto closed = closed_groups_.find(header.group);
    const bool told = closed != closed_groups_.end() && (closed->second.count(source) > 0 || header.kind == MessageKind::kClosed);
    if (!told && closed_lately_.count(header.group) > 0) {
      transport_->ignore(source, header);
      tell_closed(source, header);
    } else if (closed_groups_.count(header.group) == 0) {
      early_[header.group].emplace_back(early_load_, source, source, header, data);
    } else if (header.kind == MessageKind::kClosed) {
      transport_->forget(source, header.group);
      forget_closed(header.group, source);
      service_->on_closed_too(header.group, source);
    } else {
      transport_->ignore(source, header);
    }
    return;
  }
  const auto group = found->second; // a copy, because a failure below may remove it from the map
  const int peer = group->group_rank(source);
  if (peer < 0) {
    transport_->ignore(source, header);
    return;
  }
  try {
    route(group, peer, header, data);
  } catch (const std::exception& error) {
    fail(group, c10d::ErrorType::COMM_ERROR, message_of(error));
  }
}

// Answers a message for a group that is closed here, from a rank that was not told because it had never communicated
// with this one.
void Engine::tell_closed(int source, const Header& header) {
  if (header.kind != MessageKind::kData && header.kind != MessageKind::kPointToPoint && header.kind != MessageKind::kWindow &&
      header.kind != MessageKind::kError) {
    return; // the sender waits for no answer
  }
  Header closed;
  closed.kind = MessageKind::kClosed;
  closed.group = header.group;
  send_quietly(source, closed);
}

void Engine::send_quietly(int peer_id, const Header& header, const std::string& text) {
  if (peers()[peer_id].is_alive()) {
    auto message = header;
    message.bytes = text.size();
    try {
      transport_->send(peer_id, message, text.data());
    } catch (const std::exception&) { // no memory, or its process has just ended
    }
  }
}

void Engine::route(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data) {
  switch (header.kind) {
    case MessageKind::kError: {
      TORCH_CHECK_WITH(
          DistBackendError, header.failed_rank >= 0 && header.failed_rank < group->size(), "rank ", source,
          " reports a failure of a rank that is not in the group");
      Group::News news{header.failed_rank, text_from_peer(data, header.bytes), {source, header.failed_rank}};
      afterwards_.emplace_back([this, group, news = std::move(news)] {
        if (group->failure.reason.empty() && !group->news) {
          group->news = news;
        }
        fail(group, c10d::ErrorType::REMOTE_ERROR, "rank " + std::to_string(news.origin) + " reports: " + news.text, false);
      });
      return;
    }
    case MessageKind::kClosed: {
      group->gone.emplace(source, kDestroyed);
      transport_->forget(group->members[source].peer_id, group->id);
      service_->on_gone(*group, source, group->gone[source]);
      if (group->news) { // the rank may not have passed the news on
        spread_news(*group);
      }
      afterwards_.emplace_back(
          [this, group, source] { fail_awaiting(group, source, group->describe_member(source) + ' ' + group->gone[source], false); });
      return;
    }
    case MessageKind::kPointToPoint:
      on_point_to_point(group, source, header, data);
      return;
    case MessageKind::kConfirm: {
      const auto found = group->by_key.find(header.operation.key);
      if (found != group->by_key.end()) {
        found->second->on_confirm(source);
      }
      return;
    }
    case MessageKind::kData: {
      if (!group->failure.reason.empty()) {
        transport_->ignore(group->members[source].peer_id, header);
        return;
      }
      const auto found = group->by_key.find(header.operation.key);
      if (found != group->by_key.end() && found->second->owns(source, header)) {
        const auto operation = found->second; // a copy, because a failure removes it from the map
        hand_over(operation, source, header, data);
        return;
      }
      if ((header.operation.key & kNamedKey) == 0 && header.operation.key < group->next_key) {
        C10_THROW_ERROR(
            DistBackendError,
            c10::str(
                "ranks disagree in group '", group->name, "': rank ", source, " called ", header.operation.signature.describe(),
                " and sends to this rank ", group->rank,
                " in it, which has ended its operation at that place of its program without rank ", source));
      }
      group->early[header.operation.key].emplace_back(early_load_, group->members[source].peer_id, source, header, data);
      return;
    }
    case MessageKind::kAsk:
      on_ask(group, source, header);
      return;
    case MessageKind::kAnswer:
      on_answer(group, source, header, data);
      return;
    case MessageKind::kWindow:
    case MessageKind::kWindowReply:
      service_->on_message(group, source, header, data);
      return;
    case MessageKind::kFragment: // the transport handles these itself
    case MessageKind::kTaken:
    case MessageKind::kWanted:
    case MessageKind::kFilled:
    case MessageKind::kEmptied:
    case MessageKind::kGoodbye:
    case MessageKind::kGoodbyeTaken:
    case MessageKind::kHold:
    case MessageKind::kRelease:
    case MessageKind::kSlots:
    case MessageKind::kPlaced:
    case MessageKind::kMembership:
      return; // not specific to a group, handled in on_message()
  }
}

void Engine::on_point_to_point(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data) {
  if (!group->failure.reason.empty()) {
    transport_->ignore(group->members[source].peer_id, header);
    return;
  }
  for (auto position = group->posted.begin(); position != group->posted.end(); ++position) {
    if ((*position)->matches(source, header)) {
      const auto receive = *position;
      group->posted.erase(position);
      hand_over(receive, source, header, data);
      return;
    }
  }
  group->unexpected.emplace_back(early_load_, group->members[source].peer_id, source, header, data);
}

void Engine::hand_over(const std::shared_ptr<Operation>& operation, int source, const Header& header, const char* data) {
  try {
    operation->on_message(source, header, data);
  } catch (const std::exception& error) {
    fail(operation, error);
  }
}

} // namespace fog
