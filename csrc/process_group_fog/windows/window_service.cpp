#include "windows/window_service.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "transport/shared_memory/shared_tensors.hpp"
#include "core/failure.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kHere = PairMutex::Side::kSecond; // for whom the engine stands

// What the header's fields mean here: step: WindowOp; key: the window; transfer: the request; scale: the weight; address: p,
// or the offset; flags: these, or in a reply whether the data is the text of an error.
constexpr uint32_t kHasP = 1;
constexpr uint32_t kNeedsMutex = 2;

constexpr const char* kNoWindow = "it has no such window any more";

uint64_t bits_of(double number) {
  uint64_t bits = 0;
  std::memcpy(&bits, &number, sizeof(bits));
  return bits;
}

double number_of(uint64_t bits) {
  double number = 0;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    return "no memory"; // short enough to need none
  } catch (const std::exception& failure) {
    return message_of(failure);
  }
}

bool has_data(WindowOp op) {
  return op == WindowOp::kPut || op == WindowOp::kAccumulate || op == WindowOp::kWrite;
}

Header header_for(MessageKind kind, uint64_t group, uint64_t window, WindowOp op, uint64_t request) {
  Header header;
  header.kind = kind;
  header.group = group;
  header.key = window;
  header.step = static_cast<uint16_t>(op);
  header.transfer = request;
  return header;
}

} // namespace

// What another rank asks for.
class WindowService::Serving final : public TransferOwner {
 public:
  Serving(WindowService& service, Origin origin, const Header& request)
      : header(request), service_(service), origin_(std::move(origin)) {}

  void on_progress() override {
    if (incoming && !incoming->error.empty()) {
      error = incoming->error;
    }
    service_.active_.insert(origin_);
  }
  bool has_come() const {
    return !incoming || !incoming->error.empty() || incoming->available() == header.bytes;
  }

  const Header header;
  c10::DataPtr data; // that came, or that is to be sent
  size_t bytes = 0; // to be sent
  bool posted = false; // its data was asked for
  std::shared_ptr<Incoming> incoming; // on its way
  bool running = false;
  std::string error;

 private:
  WindowService& service_;
  const Origin origin_;
};

class WindowService::WindowTask final : public Service::Task {
 public:
  void run() noexcept override;

  std::shared_ptr<Serving> serving; // with its endpoint and origin; or
  std::shared_ptr<WindowEndpoint> endpoint;
  Origin origin;
  std::shared_ptr<WindowRequest> request; // whose data has come
  std::exception_ptr error;
};

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
    service_->end(found->second, backend_error("fog: " + what + ": " + error));
  }
}

uint64_t WindowService::next_window(const Group& group) {
  engine_.check_not_forked();
  return engine_.with_lock([&] {
    engine_.check_open(group);
    return group.next_window;
  });
}

void WindowService::open(const std::shared_ptr<Group>& group, uint64_t window, const std::shared_ptr<WindowEndpoint>& endpoint) {
  engine_.check_not_forked();
  engine_.with_lock([&] {
    engine_.check_open(*group);
    group->next_window = std::max(group->next_window, window + 1);
    windows_[{group->id, window}].endpoint = endpoint;
    for (const auto& [peer, how] : group->gone) {
      endpoint->on_gone(peer, how);
    }
  });
}

void WindowService::listen(const Group& group, uint64_t window) {
  engine_.with_lock([&] {
    const auto found = windows_.find({group.id, window});
    if (found != windows_.end() && !found->second.listens) {
      found->second.listens = true;
      ++listening_;
    }
  });
  engine_.listen();
}

void WindowService::close(const Group& group, uint64_t window) {
  if (engine_.forked()) {
    return;
  }
  engine_.with_lock([&] {
    const auto found = windows_.find({group.id, window});
    if (found != windows_.end()) {
      listening_ -= found->second.listens ? 1 : 0;
      windows_.erase(found);
    }
    const auto first = queues_.lower_bound({group.id, window, 0});
    const auto last = queues_.lower_bound({group.id, window + 1, 0});
    for (auto position = first; position != last; ++position) {
      auto& queue = position->second;
      release(queue);
      for (const auto& header : queue.locks) {
        reply(queue, header, kNoWindow);
      }
      for (const auto& serving : queue.servings) {
        reply(queue, serving->header, kNoWindow);
      }
    }
    queues_.erase(first, last);
  });
}

std::shared_ptr<WindowEndpoint> WindowService::lock(const std::weak_ptr<WindowEndpoint>& endpoint) {
  auto alive = endpoint.lock();
  if (alive) {
    released_.push_back(alive);
  }
  return alive;
}

std::vector<std::shared_ptr<WindowEndpoint>> WindowService::endpoints(const Group& group) {
  std::vector<std::shared_ptr<WindowEndpoint>> endpoints;
  for (const auto& [key, window] : windows_) {
    if (auto endpoint = key.first == group.id ? lock(window.endpoint) : nullptr) {
      endpoints.push_back(std::move(endpoint));
    }
  }
  return endpoints;
}

// --- the origin ---

void WindowService::request(const std::shared_ptr<WindowRequest>& request, std::chrono::milliseconds timeout) {
  request->timeout_ = timeout;
  request->deadline_ = deadline_after(timeout);
  engine_.begin(request->deadline_, [&] { send_request(request); });
}

void WindowService::send_request(const std::shared_ptr<WindowRequest>& request) {
  if (const auto gone = request->group->gone.find(request->peer); gone != request->group->gone.end()) {
    std::rethrow_exception(
        backend_error("fog: " + request->what + ": " + request->group->describe_member(request->peer) + ' ' + gone->second));
  }
  request->service_ = this;
  request->id_ = next_request_++;
  auto header = header_for(MessageKind::kWindow, request->group->id, request->window, request->op, request->id_);
  header.scale = request->weight;
  header.address = request->op == WindowOp::kWrite ? request->offset : bits_of(request->p.value_or(0.0));
  header.flags = (request->p ? kHasP : 0U) | (request->mutex ? kNeedsMutex : 0U);
  header.bytes = has_data(request->op) ? request->data.nbytes() : 0;
  requests_.emplace(request->id_, request);
  try {
    const void* data = header.bytes > 0 ? request->data.const_data_ptr() : nullptr;
    request->outgoing_ = engine_.transport()
                             .send(
                                 {{request->group->members[request->peer].peer_id, request->weight}}, header, data,
                                 Transport::Memory::kMessages, request)
                             .outgoing;
  } catch (const Unreachable& error) {
    end(request, backend_error("fog: " + request->what + ": " + request->group->describe_member(request->peer) + ' ' + error.what()));
  } catch (const std::exception& error) {
    end(request, backend_error("fog: " + request->what + ": " + message_of(error)));
  }
}

void WindowService::forget(const WindowRequest& request) {
  engine_.with_lock([&] { requests_.erase(request.id_); });
}

void WindowService::tell(const Group& group, uint64_t window, int peer, WindowOp op) {
  engine_.tell([&] { tell_now(group, window, peer, op); });
}

void WindowService::tell_now(const Group& group, uint64_t window, int peer, WindowOp op) {
  if (group.closed || group.gone.count(peer) > 0) { // after the news of the end nothing of the group may come
    return;
  }
  try {
    engine_.transport().send(group.members[peer].peer_id, header_for(MessageKind::kWindow, group.id, window, op, 0));
  } catch (const std::exception&) { // then it cannot be reached, and has nothing to wait for
  }
}

void WindowService::on_reply(int source, const Header& header, const char* data) {
  const auto found = requests_.find(header.transfer);
  const auto request = found == requests_.end() ? nullptr : found->second;
  if (header.flags != 0) {
    if (request) {
      const auto peer = "rank " + std::to_string(request->peer);
      end(request, backend_error("fog: " + request->what + ": " + peer + " reports: " + std::string(data, header.bytes)));
    }
    return;
  }
  if (header.bytes > 0) {
    // Data that nobody waits for any more has to be received all the same.
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
        end(request, backend_error(c10::str("fog: ", request->what, ": cannot receive ", header.bytes, " bytes: ", message_of(error))));
      }
      return;
    }
  }
  if (request && header.bytes != request->reply_bytes) {
    end(request,
        backend_error(
            c10::str(
                "fog: ", request->what, ": rank ", request->peer, " replies with ", header.bytes, " bytes; expected are ",
                request->reply_bytes)));
  } else if (request) {
    request->replied_ = true;
    settle(request);
  }
}

void WindowService::settle(const std::shared_ptr<WindowRequest>& request) {
  if (!request->replied_ || !request->moved()) {
    return;
  }
  if (!request->take) {
    end(request, nullptr);
    return;
  }
  auto task = std::make_shared<WindowTask>();
  task->request = request;
  tasks_.push_back(std::move(task));
  request->replied_ = false; // once
  request->taking_ = true;
}

void WindowService::end(const std::shared_ptr<WindowRequest>& request, std::exception_ptr error) {
  if (requests_.count(request->id_) == 0) {
    return;
  }
  if (request->taking_) { // it writes to the window: finish() goes on
    request->error_ = error;
    return;
  }
  // The call holds the request, so that its tensor is released without the lock.
  calls_.emplace_back([request, error] { request->done(error); });
  requests_.erase(request->id_);
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
    end(request,
        backend_error(c10::str("fog: ", request->what, " timed out: its timeout of ", request->timeout_.count(), " ms is over")));
  }
  return earliest;
}

void WindowService::fail_group(const Group& group, const std::string& reason) {
  const auto requests = requests_;
  for (const auto& [id, request] : requests) {
    if (request->group->id == group.id) {
      end(request, backend_error("fog: " + request->what + ": " + reason));
    }
  }
}

void WindowService::fail_all(const std::string& reason) {
  const auto requests = requests_;
  for (const auto& [id, request] : requests) {
    end(request, backend_error("fog: " + request->what + ": " + reason));
  }
  for (const auto& [origin, queue] : queues_) { // the news of one may have been lost with what failed
    active_.insert(origin);
  }
}

// --- the target ---

void WindowService::on_message(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data) {
  if (header.kind == MessageKind::kWindowReply) {
    on_reply(group->members[source].peer_id, header, data);
    return;
  }
  try {
    on_request(group, source, header, data);
  } catch (const std::exception& error) { // there is no memory for it
    Queue queue;
    queue.group = group;
    queue.source = source;
    reply(queue, header, message_of(error));
  }
}

void WindowService::on_request(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data) {
  const Origin origin{group->id, header.key, source};
  auto& queue = queues_[origin];
  if (!queue.group) {
    queue.group = group;
    queue.source = source;
    queue.window = header.key;
    const auto found = windows_.find({group->id, header.key});
    if (found != windows_.end()) {
      queue.endpoint = found->second.endpoint;
    }
  }
  if (const auto endpoint = lock(queue.endpoint); endpoint && !endpoint->is_neighbor(source)) {
    queue.endpoint.reset(); // it has no window for that rank
  }
  if (static_cast<WindowOp>(header.step) == WindowOp::kLock) {
    queue.locks.push_back(header);
  } else {
    auto serving = std::make_shared<Serving>(*this, origin, header);
    if (header.bytes > 0 && data != nullptr) {
      try {
        serving->data = shared_allocator().allocate(header.bytes);
        std::memcpy(serving->data.get(), data, header.bytes);
      } catch (const std::exception& error) {
        serving->error = c10::str("it cannot receive ", header.bytes, " bytes: ", message_of(error));
      }
      serving->posted = true;
    }
    queue.servings.push_back(std::move(serving));
  }
  active_.insert(origin);
}

void WindowService::post(const Queue& queue, const std::shared_ptr<Serving>& serving) {
  const auto& header = serving->header;
  try {
    serving->data = shared_allocator().allocate(header.bytes);
    serving->incoming = engine_.transport().receive(queue.group->members[queue.source].peer_id, header, serving->data.get(), serving);
  } catch (const std::exception& error) { // of this request alone; nothing of it is applied
    serving->error = c10::str("it cannot receive ", header.bytes, " bytes: ", message_of(error));
  }
  serving->posted = true;
}

bool WindowService::obtain(Queue& queue, WindowEndpoint& endpoint, Hold hold) {
  if (queue.hold != Hold::kNone) {
    return false;
  }
  auto& mutex = endpoint.mutex(queue.source);
  if (!(queue.queued ? mutex.held_by(kHere) : mutex.lock_or_queue(kHere))) {
    queue.queued = true;
    return false;
  }
  queue.queued = false;
  queue.hold = hold;
  return true;
}

void WindowService::release(Queue& queue) {
  const auto endpoint = lock(queue.endpoint);
  if (endpoint && queue.queued && !endpoint->mutex(queue.source).give_up(kHere)) {
    queue.hold = Hold::kUser;
  }
  queue.queued = false;
  if (endpoint && queue.hold != Hold::kNone && endpoint->mutex(queue.source).held_by(kHere)) {
    endpoint->mutex(queue.source).unlock(kHere);
  }
  queue.hold = Hold::kNone;
}

bool WindowService::advance(const Origin& origin, Queue& queue) {
  const auto endpoint = lock(queue.endpoint);
  while (!queue.locks.empty()) {
    if (endpoint && !obtain(queue, *endpoint, Hold::kUser)) {
      break;
    }
    reply(queue, queue.locks.front(), endpoint ? "" : kNoWindow);
    queue.locks.pop_front();
  }
  while (!queue.servings.empty()) {
    const auto serving = queue.servings.front();
    const auto& header = serving->header;
    const auto op = static_cast<WindowOp>(header.step);
    if (serving->running) {
      return false; // finish() goes on
    }
    if (header.bytes > 0 && !serving->posted) {
      post(queue, serving);
    }
    if (!serving->has_come()) {
      return false; // on_progress() goes on
    }
    if (op == WindowOp::kUnlock || op == WindowOp::kLeave) {
      if (queue.hold == Hold::kUser || op == WindowOp::kLeave) {
        release(queue);
      } else if (!queue.locks.empty()) { // the origin does not wait for it any longer
        queue.locks.pop_front();
        release(queue);
      }
      if (op == WindowOp::kLeave && endpoint) {
        endpoint->on_left(queue.source);
      } else {
        reply(queue, header, "");
      }
      queue.servings.pop_front();
      continue;
    }
    if (!endpoint || !serving->error.empty()) {
      reply(queue, header, endpoint ? serving->error : kNoWindow);
      queue.servings.pop_front();
      continue;
    }
    if (op == WindowOp::kSignal) {
      endpoint->on_signal(queue.source);
      reply(queue, header, "");
      queue.servings.pop_front();
      continue;
    }
    if ((header.flags & kNeedsMutex) != 0 && queue.hold == Hold::kNone && !obtain(queue, *endpoint, Hold::kOperation)) {
      return true;
    }
    auto task = std::make_shared<WindowTask>();
    task->serving = serving;
    task->endpoint = endpoint;
    task->origin = origin;
    tasks_.push_back(std::move(task));
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

std::shared_ptr<Service::Task> WindowService::next_task() {
  if (tasks_.empty()) {
    return nullptr;
  }
  auto task = tasks_.front();
  released_.push_back(task); // so that finish() needs no memory for it
  tasks_.pop_front();
  ++running_;
  return task;
}

void WindowService::WindowTask::run() noexcept {
  if (request) {
    try {
      request->take(request->received_.get());
    } catch (...) {
      error = std::current_exception();
    }
    return;
  }
  auto& window = *endpoint;
  const auto& header = serving->header;
  try {
    if (static_cast<WindowOp>(header.step) == WindowOp::kGet) {
      serving->bytes = window.bytes();
      serving->data = shared_allocator().allocate(serving->bytes);
      window.read(serving->data.get());
    } else if (static_cast<WindowOp>(header.step) == WindowOp::kWrite) {
      window.write(std::get<2>(origin), header.address, serving->data.get(), header.bytes);
    } else {
      const auto p = (header.flags & kHasP) != 0 ? std::make_optional(number_of(header.address)) : std::nullopt;
      window.apply(std::get<2>(origin), static_cast<WindowOp>(header.step), header.scale, p, serving->data.get(), header.bytes);
    }
  } catch (const std::exception&) {
    error = std::current_exception();
  }
}

void WindowService::finish(const std::shared_ptr<Task>& done) {
  const auto task = std::static_pointer_cast<WindowTask>(done);
  --running_;
  if (task->request) {
    task->request->taking_ = false;
    end(task->request, task->request->error_ ? task->request->error_ : task->error);
    return;
  }
  const auto found = queues_.find(task->origin);
  if (found == queues_.end()) {
    return; // the source has gone
  }
  auto& queue = found->second;
  const auto& serving = task->serving;
  const bool get = static_cast<WindowOp>(serving->header.step) == WindowOp::kGet;
  if (task->error) {
    serving->error = text_of(task->error);
  }
  queue.servings.pop_front(); // it has been done, whether the source hears of it or not
  if (queue.hold == Hold::kOperation) {
    release(queue);
  }
  reply(queue, serving->header, serving->error, get && serving->error.empty() ? serving : nullptr);
  active_.insert(task->origin);
}

void WindowService::reply(const Queue& queue, const Header& request, const std::string& error, const std::shared_ptr<Serving>& data) {
  // Nobody expects it, or who does knows without it.
  if (request.transfer == 0 || queue.group->closed || queue.group->gone.count(queue.source) > 0) {
    return;
  }
  auto header =
      header_for(MessageKind::kWindowReply, request.group, request.key, static_cast<WindowOp>(request.step), request.transfer);
  const void* content = error.data();
  if (data) {
    content = data->data.get();
    header.bytes = data->bytes;
  } else if (!error.empty()) {
    header.flags = 1;
    header.bytes = std::min(error.size(), Transport::kInlineBytes);
  }
  try {
    engine_.transport().send(
        {{queue.group->members[queue.source].peer_id, header.scale}}, header, content, Transport::Memory::kMessages, data);
  } catch (const std::exception&) { // it cannot be told; its own time-out will
  }
}

void WindowService::on_gone(const Group& group, int peer, const std::string& how) {
  std::vector<std::shared_ptr<WindowRequest>> lost;
  for (const auto& [id, request] : requests_) {
    if (request->group->id == group.id && request->peer == peer) {
      lost.push_back(request);
    }
  }
  for (const auto& request : lost) {
    end(request, backend_error("fog: " + request->what + ": " + group.describe_member(peer) + ' ' + how));
  }
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
  for (const auto& endpoint : endpoints(group)) { // whose owner may take mutexes away from now on
    endpoint->on_gone(peer, how);
  }
}

std::vector<std::function<void()>> WindowService::on_closing(const Group& group) {
  std::vector<std::function<void()>> calls;
  for (const auto& endpoint : endpoints(group)) {
    calls.emplace_back([endpoint] { endpoint->on_group_closed(); });
  }
  return calls;
}

std::vector<std::function<void()>> WindowService::take_calls() {
  return std::exchange(calls_, {});
}

std::vector<std::shared_ptr<void>> WindowService::take_released() {
  return std::exchange(released_, {});
}

} // namespace fog
