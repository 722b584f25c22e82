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
  engine_.begin(request->deadline_, [&] { send_request(request); }, request->waits);
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
  if (found != service_->requests_.end()) {
    service_->settle(found->second);
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

// Serving the requests of other ranks for this rank's windows.

namespace {

constexpr auto kHere = PairMutex::Side::kSecond; // the engine acts for the neighbor
constexpr const char* kNoWindow = "it has no such window any more";

} // namespace

// A request of another rank.
class WindowService::Serving final : public TransferOwner {
 public:
  Serving(WindowService& service, Origin its_origin, const Header& request)
      : header(request), origin(std::move(its_origin)), service_(service) {}

  void on_progress() override {
    service_.active_.insert(origin);
  }
  bool has_come() const {
    return !incoming || incoming->available() == header.bytes;
  }
  WindowOp op() const {
    return header.window.op;
  }

  const Header header;
  const Origin origin;
  c10::DataPtr data; // received, or to be sent
  size_t bytes = 0; // to be sent
  bool posted = false; // receiving its data has begun
  std::shared_ptr<Incoming> incoming; // set while data is being received
  bool running = false;
  std::string error;

 private:
  WindowService& service_;
};

// Executes a request. Keeps the window until the engine continues with the queue, because the last reference must not
// be released with the lock.
class WindowService::ServingTask final : public Service::Task {
 public:
  ServingTask(WindowService& service, std::shared_ptr<Serving> serving, std::shared_ptr<Window> window)
      : service_(service), serving_(std::move(serving)), window_(std::move(window)) {}

  void run() noexcept override {
    try {
      apply();
    } catch (const std::exception&) {
      failure_ = std::current_exception();
    }
  }
  void finish();

 private:
  void apply();

  WindowService& service_;
  const std::shared_ptr<Serving> serving_;
  const std::shared_ptr<Window> window_;
  std::exception_ptr failure_;
};

void WindowService::ServingTask::apply() {
  const auto& header = serving_->header;
  if (serving_->op() == WindowOp::kGet) {
    serving_->bytes = window_->bytes();
    serving_->data = shared_allocator().allocate(serving_->bytes);
    window_->read(serving_->data.get());
  } else if (serving_->op() == WindowOp::kWrite) {
    window_->receive(header.window.offset, serving_->data.get(), header.bytes);
  } else {
    const auto& window = header.window;
    const auto p = window.has_p != 0 ? std::make_optional(window.p) : std::nullopt;
    const int source = std::get<2>(serving_->origin);
    window_->apply(source, serving_->op(), header.scale, p, window.puts, serving_->data.get(), header.bytes);
  }
}

void WindowService::ServingTask::finish() {
  const auto found = service_.queues_.find(serving_->origin);
  if (found == service_.queues_.end()) {
    return; // the source has gone
  }
  auto& queue = found->second;
  auto& error = serving_->error;
  if (failure_) {
    try {
      std::rethrow_exception(failure_);
    } catch (const std::bad_alloc&) {
      error = "no memory"; // short enough for a string without an allocation
    } catch (const std::exception& reason) {
      error = message_of(reason);
    }
  }
  queue.servings.pop_front(); // the request is done, even if the reply fails
  if (queue.hold == Hold::kOperation) {
    service_.release(queue);
  }
  const bool get = serving_->op() == WindowOp::kGet;
  service_.reply(queue, serving_->header, error, get && error.empty() ? serving_ : nullptr);
  service_.active_.insert(serving_->origin);
}

std::shared_ptr<Service::Task> WindowService::next_task() {
  if (tasks_.empty()) {
    return nullptr;
  }
  auto task = tasks_.front();
  released_.push_back(task); // so that finish() does not allocate
  tasks_.pop_front();
  ++running_;
  return task;
}

void WindowService::finish(const std::shared_ptr<Task>& task) {
  --running_;
  static_cast<ServingTask&>(*task).finish();
}

void WindowService::on_message(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data) {
  if (header.kind == MessageKind::kWindowReply) {
    on_reply(group->members[source].peer_id, header, data);
    return;
  }
  try {
    on_request(group, source, header, data);
  } catch (const std::exception& error) { // no memory
    Queue queue;
    queue.group = group;
    queue.source = source;
    reply(queue, header, message_of(error));
  }
}

void WindowService::on_request(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data) {
  const Origin origin{group->id, header.window.number, source};
  auto& queue = queues_[origin];
  if (!queue.group) {
    queue.group = group;
    queue.source = source;
    const auto found = windows_.find({group->id, header.window.number});
    if (found != windows_.end()) {
      queue.window = found->second.window;
    }
  }
  if (const auto window = lock(queue.window); window && !window->is_neighbor(source)) {
    queue.window.reset(); // the window does not have that rank as a neighbor
  }
  if (header.window.op == WindowOp::kLock) {
    queue.locks.push_back(header);
  } else {
    auto serving = std::make_shared<Serving>(*this, origin, header);
    if (header.bytes > 0 && data != nullptr) {
      take_data(queue, serving, data);
    }
    queue.servings.push_back(std::move(serving));
  }
  active_.insert(origin);
}

void WindowService::take_data(const Queue& queue, const std::shared_ptr<Serving>& serving, const char* data) {
  const auto& header = serving->header;
  serving->posted = true;
  try {
    const auto window = lock(queue.window);
    const size_t window_bytes = window ? window->bytes() : 0;
    if (window && header.bytes > window_bytes) { // before memory is taken for it
      engine_.transport().ignore(queue.group->members[queue.source].peer_id, header);
      C10_THROW_ERROR(ValueError, c10::str("the window has ", window_bytes));
    }
    serving->data = shared_allocator().allocate(header.bytes);
    if (data != nullptr) {
      std::memcpy(serving->data.get(), data, header.bytes);
    } else {
      const auto source = queue.group->members[queue.source].peer_id;
      serving->incoming = engine_.transport().receive(source, header, serving->data.get(), serving);
    }
  } catch (const std::exception& error) { // fails only this request; none of its data is applied
    serving->error = "no memory"; // short enough for a string without an allocation
    // A stream without memory is empty and raises nothing.
    if (auto text = c10::str("it cannot receive ", header.bytes, " bytes: ", message_of(error)); !text.empty()) {
      serving->error = std::move(text);
    }
  }
}

bool WindowService::obtain(Queue& queue, Window& window, Hold hold) {
  if (queue.hold != Hold::kNone) {
    return false;
  }
  auto& mutex = window.mutex(queue.source);
  if (!(queue.queued ? mutex.held_by(kHere) : mutex.lock_or_queue(kHere))) {
    queue.queued = true;
    return false;
  }
  queue.queued = false;
  queue.hold = hold;
  return true;
}

void WindowService::release(Queue& queue) {
  if (const auto window = lock(queue.window)) {
    auto& mutex = window->mutex(queue.source);
    const bool handed = queue.queued && !mutex.give_up(kHere);
    if (handed || queue.hold != Hold::kNone) {
      mutex.unlock(kHere);
    }
  }
  queue.queued = false;
  queue.hold = Hold::kNone;
}

void WindowService::on_left(const Queue& queue, uint64_t window) {
  const auto peer = queue.group->members[queue.source].peer_id;
  const auto found = windows_.find({queue.group->id, window});
  if (found != windows_.end()) {
    found->second.leave(peer);
  }
  calls_.emplace_back([this, group = queue.group->id, window, peer] { DeferredFree::left(engine_, {group, window}, peer); });
}

bool WindowService::advance(const Origin& origin, Queue& queue) {
  const auto window = lock(queue.window);
  while (!queue.locks.empty()) {
    if (window && !obtain(queue, *window, Hold::kUser)) {
      break;
    }
    reply(queue, queue.locks.front(), window ? "" : kNoWindow);
    queue.locks.pop_front();
  }
  for (; !queue.servings.empty(); queue.servings.pop_front()) {
    const auto serving = queue.servings.front();
    const auto& header = serving->header;
    if (serving->running) {
      return false; // finish() of its task continues
    }
    if (header.bytes > 0 && !serving->posted) {
      take_data(queue, serving, nullptr);
    }
    if (!serving->has_come()) {
      return false; // on_progress() continues
    }
    switch (serving->op()) {
      case WindowOp::kUnlock:
        if (queue.hold == Hold::kUser) {
          release(queue);
        } else if (!queue.locks.empty()) { // the origin has stopped waiting for it
          queue.locks.pop_front();
          release(queue);
        }
        reply(queue, header, "");
        continue;
      case WindowOp::kLeave:
        release(queue);
        on_left(queue, header.window.number);
        reply(queue, header, "");
        continue;
      default:
        break;
    }
    if (!window || !serving->error.empty()) {
      reply(queue, header, window ? serving->error : kNoWindow);
      continue;
    }
    if (serving->op() == WindowOp::kSignal) {
      window->on_signal(queue.source);
      reply(queue, header, "");
      continue;
    }
    if (header.window.needs_mutex != 0 && queue.hold == Hold::kNone && !obtain(queue, *window, Hold::kOperation)) {
      return true;
    }
    tasks_.push_back(std::make_shared<ServingTask>(*this, serving, window));
    serving->running = true;
    return false;
  }
  return !queue.locks.empty();
}

void WindowService::advance() {
  const auto active = active_;
  for (const auto& origin : active) {
    const auto found = queues_.find(origin);
    if (found == queues_.end()) {
      active_.erase(origin);
      continue;
    }
    auto& queue = found->second;
    if (!advance(origin, queue)) {
      active_.erase(origin);
      if (queue.servings.empty() && queue.locks.empty() && queue.hold == Hold::kNone && !queue.queued) {
        queues_.erase(found);
      }
    }
  }
}

void WindowService::reply(const Queue& queue, const Header& request, const std::string& error, const std::shared_ptr<Serving>& data) {
  // No reply is expected, or the source knows the outcome without it.
  if (request.window.request == 0 || queue.group->closed || queue.group->gone.count(queue.source) > 0) {
    return;
  }
  auto header = header_for(MessageKind::kWindowReply, request.group, request.window.number, request.window.op, request.window.request);
  const void* content = error.data();
  if (data) {
    content = data->data.get();
    header.bytes = data->bytes;
  } else if (!error.empty()) {
    header.window.failed = 1;
    header.bytes = std::min(error.size(), Transport::kInlineBytes);
  }
  try {
    engine_.transport().send(
        {{queue.group->members[queue.source].peer_id, header.scale}}, header, content, Transport::Memory::kMessages, data);
  } catch (const std::exception&) { // the source cannot be told; its own timeout ends the request
  }
}

void WindowService::close(const Group& group, uint64_t number) {
  if (engine_.forked()) {
    return;
  }
  engine_.with_lock([&] {
    const auto found = windows_.find({group.id, number});
    if (found != windows_.end()) {
      listening_ -= found->second.listens ? 1 : 0;
      windows_.erase(found);
    }
    const auto first = queues_.lower_bound({group.id, number, 0});
    const auto last = queues_.lower_bound({group.id, number + 1, 0});
    for (auto position = first; position != last; ++position) {
      auto& queue = position->second;
      release(queue);
      for (const auto& header : queue.locks) {
        reply(queue, header, kNoWindow);
      }
      for (const auto& serving : queue.servings) {
        if (serving->op() == WindowOp::kLeave) {
          on_left(queue, number);
        }
        reply(queue, serving->header, kNoWindow);
      }
    }
    queues_.erase(first, last);
  });
}

} // namespace fog
