// The registry of windows, and this rank's requests to others.
#include "windows/window_service.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include <c10/util/StringUtil.h>

#include "core/failure.hpp"
#include "transport/shared_memory/shared_tensors.hpp"
#include "windows/deferred_free.hpp"
#include "windows/window.hpp"

namespace fog {

uint64_t WindowService::next_window(const Group& group) {
  engine_.check_not_forked();
  return engine_.with_lock([&] {
    engine_.check_open(group);
    return group.next_window;
  });
}

void WindowService::open(
    const std::shared_ptr<Group>& group,
    uint64_t number,
    const std::shared_ptr<Window>& window,
    std::shared_ptr<WindowMemory> memory,
    const std::vector<int>& neighbors) {
  std::vector<PeerId> peers;
  for (const int rank : neighbors) {
    peers.push_back(group->members[rank].peer_id);
  }
  engine_.check_not_forked();
  engine_.with_lock([&] {
    engine_.check_open(*group);
    group->next_window = std::max(group->next_window, number + 1);
    windows_[{group->id, number}] = {window, std::move(memory), peers, {}, false};
    for (const PeerId peer : peers) { // they may write here without messages, so no message would reveal their end
      engine_.transport().watch(peer);
    }
    for (const auto& [peer, how] : group->gone) {
      window->on_gone(peer, how);
    }
  });
}

void WindowService::listen(const Group& group, uint64_t number, std::vector<PeerId> tellers) {
  engine_.with_lock([&] {
    const auto found = windows_.find({group.id, number});
    if (found != windows_.end() && !found->second.listens) {
      found->second.listens = true;
      found->second.tellers = std::move(tellers);
      ++listening_;
    }
  });
  engine_.listen();
}

std::shared_ptr<Window> WindowService::lock(const std::weak_ptr<Window>& window) {
  auto alive = window.lock();
  if (alive) {
    released_.push_back(alive);
  }
  return alive;
}

std::vector<std::shared_ptr<Window>> WindowService::windows_of(const Group& group) {
  std::vector<std::shared_ptr<Window>> windows;
  for (const auto& [key, entry] : windows_) {
    if (auto window = key.first == group.id ? lock(entry.window) : nullptr) {
      windows.push_back(std::move(window));
    }
  }
  return windows;
}

std::vector<std::function<void()>> WindowService::on_closing(const Group& group) {
  std::vector<std::function<void()>> calls;
  for (const auto& window : windows_of(group)) {
    calls.emplace_back([window] { window->on_group_closed("belongs to a group that was destroyed"); });
  }
  return calls;
}

void WindowService::on_expelled(const Group& group, const std::string& reason) {
  for (const auto& window : windows_of(group)) {
    // At once: another thread may look for expulsions before the call below, find none that is new, and write.
    window->close("is closed: " + reason);
    calls_.emplace_back([window, reason] { window->on_group_closed(reason); });
  }
  fail_group(group, reason);
}

std::vector<PeerId> WindowService::watched() const {
  std::vector<PeerId> peers;
  for (const auto& [key, entry] : windows_) {
    peers.insert(peers.end(), entry.peers.begin(), entry.peers.end());
  }
  return peers;
}

Header WindowService::header_for(MessageKind kind, uint64_t group, uint64_t window, WindowOp op, uint64_t request) {
  Header header;
  header.kind = kind;
  header.group = group;
  header.window = {};
  header.window.number = window;
  header.window.op = op;
  header.window.request = request;
  return header;
}

// --- the origin ---

void WindowService::request(const std::shared_ptr<WindowRequest>& request, std::chrono::milliseconds timeout) {
  request->timeout_ = timeout;
  request->deadline_ = deadline_after(timeout);
  engine_.begin(request->deadline_, [&] { send_request(request); });
}

void WindowService::send_request(const std::shared_ptr<WindowRequest>& request) {
  const auto& group = *request->group;
  if (const auto gone = group.gone.find(request->peer); gone != group.gone.end()) {
    std::rethrow_exception(backend_error("fog: " + request->what + ": " + group.describe_member(request->peer) + ' ' + gone->second));
  }
  const auto found = windows_.find({group.id, request->window});
  if (group.closed || found == windows_.end() || !lock(found->second.window)) { // no message may follow the news of the end
    std::rethrow_exception(backend_error("fog: " + request->what + ": the window is closed"));
  }
  request->service_ = this;
  request->id_ = next_request_++;
  auto header = header_for(MessageKind::kWindow, group.id, request->window, request->op, request->id_);
  auto& window = header.window;
  window.offset = request->offset;
  window.puts = request->puts;
  window.p = request->p.value_or(0.0);
  window.has_p = request->p ? 1 : 0;
  window.codec_bytes = static_cast<uint32_t>(request->codec_bytes);
  window.needs_mutex = request->mutex ? 1 : 0;
  header.scale = request->weight;
  header.bytes = request->data.defined() ? request->data.nbytes() : 0;
  requests_.emplace(request->id_, request);
  try {
    const void* data = header.bytes > 0 ? request->data.const_data_ptr() : nullptr;
    request->outgoing_ =
        engine_.transport()
            .send({{group.members[request->peer].peer_id, request->weight}}, header, data, Transport::Memory::kMessages, request)
            .outgoing;
  } catch (const Unreachable& error) {
    fail(request, ": " + group.describe_member(request->peer) + ' ' + error.what());
  } catch (const std::exception& error) {
    fail(request, ": " + message_of(error));
  }
}

void WindowService::forget(const WindowRequest& request) {
  engine_.with_lock([&] { requests_.erase(request.id_); });
}

void WindowService::tell(const Group& group, uint64_t window, int peer, WindowOp op) {
  engine_.tell([&] { tell_now(group, window, peer, op); });
}

void WindowService::tell_now(const Group& group, uint64_t window, int peer, WindowOp op) {
  if (group.closed || group.gone.count(peer) > 0) { // after the news of the end, no message of the group may follow
    return;
  }
  try {
    engine_.transport().send(group.members[peer].peer_id, header_for(MessageKind::kWindow, group.id, window, op, 0));
  } catch (const std::exception&) { // the peer cannot be reached, so it does not wait either
  }
}

void WindowService::on_reply(PeerId source, const Header& header, const char* data) {
  const auto found = requests_.find(header.window.request);
  const auto request = found == requests_.end() ? nullptr : found->second;
  if (header.window.failed != 0) {
    if (request) {
      fail(request, c10::str(": rank ", request->peer, " reports: ", text_from_peer(data, header.bytes)));
    }
    return;
  }
  if (header.bytes > 0) {
    // Data that no caller waits for any more must be received nevertheless.
    const auto owner = request ? request : std::make_shared<WindowRequest>();
    owner->service_ = this;
    try {
      owner->received_ = shared_allocator().allocate(header.bytes);
      if (data != nullptr) {
        std::memcpy(owner->received_.get(), data, header.bytes);
      } else {
        owner->incoming_ = engine_.transport().receive(source, header, owner->received_.get(), owner);
      }
    } catch (const std::exception& error) {
      if (request) {
        fail(request, c10::str(": cannot receive ", header.bytes, " bytes: ", message_of(error)));
      }
      return;
    }
  }
  if (request && header.bytes != request->reply_bytes) {
    fail(request, c10::str(": rank ", request->peer, " replies with ", header.bytes, " bytes; expected are ", request->reply_bytes));
  } else if (request) {
    request->replied_ = true;
    settle(request);
  }
}

void WindowService::settle(const std::shared_ptr<WindowRequest>& request) {
  if (request->replied_ && request->moved()) {
    end(request, nullptr);
  }
}

bool WindowRequest::moved() const {
  return (!outgoing_ || outgoing_->done()) && (!incoming_ || incoming_->available() == reply_bytes);
}

void WindowRequest::on_progress() {
  const auto found = service_->requests_.find(id_);
  if (found == service_->requests_.end()) {
    return;
  }
  const auto& error = outgoing_ && !outgoing_->error.empty() ? outgoing_->error : incoming_ ? incoming_->error : std::string();
  if (error.empty()) {
    service_->settle(found->second);
  } else {
    service_->fail(found->second, ": " + error);
  }
}

void WindowService::end(std::shared_ptr<WindowRequest> request, std::exception_ptr error) {
  if (requests_.erase(request->id_) == 0) {
    return;
  }
  calls_.emplace_back([request = std::move(request), error = std::move(error)]() mutable {
    if (request->take && !error) {
      try {
        request->take(request->received_.get());
      } catch (...) {
        error = std::current_exception();
      }
    }
    request->done(error);
  });
}

void WindowService::fail(const std::shared_ptr<WindowRequest>& request, const std::string& reason) {
  end(request, backend_error("fog: " + request->what + reason));
}

void WindowService::fail_those(const std::string& reason, const std::function<bool(const WindowRequest& request)>& concerned) {
  const auto requests = requests_;
  for (const auto& [id, request] : requests) {
    if (concerned(*request)) {
      fail(request, reason);
    }
  }
}

Deadline WindowService::check_deadlines(Deadline now) {
  std::vector<std::shared_ptr<WindowRequest>> late;
  auto earliest = Deadline::max();
  for (const auto& [id, request] : requests_) {
    if (now >= request->deadline_) {
      late.push_back(request);
    } else {
      earliest = std::min(earliest, request->deadline_);
    }
  }
  for (const auto& request : late) {
    if (request->op == WindowOp::kLock) {
      tell_now(*request->group, request->window, request->peer, WindowOp::kUnlock);
    }
    fail(request, c10::str(" timed out: its timeout of ", request->timeout_.count(), " ms is over"));
  }
  return earliest;
}

void WindowService::fail_group(const Group& group, const std::string& reason) {
  fail_those(": " + reason, [&](const WindowRequest& request) { return request.group->id == group.id; });
}

void WindowService::fail_all(const std::string& reason) {
  fail_those(": " + reason, [](const WindowRequest&) { return true; });
  for (const auto& [origin, queue] : queues_) { // the notifications of some may have been lost with the failure
    active_.insert(origin);
  }
}

void WindowService::on_gone(const Group& group, int peer, const std::string& how) {
  // Tell the windows first: a caller whose request fails then finds the reason there. From now on these windows may
  // seize the peer's mutexes.
  for (const auto& window : windows_of(group)) {
    window->on_gone(peer, how);
  }
  fail_those(": " + group.describe_member(peer) + ' ' + how, [&](const WindowRequest& request) {
    return request.group->id == group.id && request.peer == peer;
  });
  for (auto position = queues_.begin(); position != queues_.end();) {
    auto& queue = position->second;
    if (std::get<0>(position->first) == group.id && queue.source == peer) {
      release(queue);
      active_.erase(position->first);
      position = queues_.erase(position);
    } else {
      ++position;
    }
  }
  on_left_group(group.id, group.members[peer].peer_id);
}

void WindowService::on_left_group(uint64_t group, PeerId peer) {
  for (auto found = windows_.lower_bound({group, 0}); found != windows_.end() && found->first.first == group; ++found) {
    if (contains(found->second.tellers, peer)) {
      found->second.leave(peer);
    }
  }
  calls_.emplace_back([this, group, peer] { DeferredFree::left(engine_, group, peer); });
}

bool WindowService::has_window_of(const c10::Storage& storage) {
  engine_.check_not_forked();
  std::vector<std::shared_ptr<Window>> windows; // released without the lock
  engine_.with_lock([&] {
    for (const auto& [key, entry] : windows_) {
      windows.push_back(entry.window.lock());
    }
  });
  return DeferredFree::keeps(storage) ||
      std::any_of(windows.begin(), windows.end(), [&](const auto& window) { return window && window->is_in(storage); });
}

} // namespace fog
