// Serving the requests of other ranks for this rank's windows.
#include <algorithm>
#include <cstring>
#include <utility>

#include <c10/util/StringUtil.h>

#include "core/failure.hpp"
#include "transport/shared_memory/shared_tensors.hpp"
#include "windows/deferred_free.hpp"
#include "windows/window.hpp"
#include "windows/window_service.hpp"

namespace fog {
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
    if (incoming && !incoming->error.empty()) {
      error = incoming->error;
    }
    service_.active_.insert(origin);
  }
  bool has_come() const {
    return !incoming || !incoming->error.empty() || incoming->available() == header.bytes;
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
    const auto* data = static_cast<const char*>(serving_->data.get());
    const size_t bytes = header.bytes - std::min<size_t>(header.bytes, window.codec_bytes);
    const std::string codec(data + bytes, header.bytes - bytes);
    window_->apply(std::get<2>(serving_->origin), serving_->op(), header.scale, p, window.puts, data, bytes, codec);
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
    constexpr size_t kCodecNumbers = 4096;
    // Encoded values may take more than the tensor: at most an index of 4 bytes for each element of 2, and a few numbers.
    const bool encoded = header.window.codec_bytes > 0;
    const size_t most = encoded ? 4 * window_bytes + header.window.codec_bytes + kCodecNumbers : window_bytes;
    if (window && header.bytes > most) { // before memory is taken for it
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
