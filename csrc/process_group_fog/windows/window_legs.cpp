// Operations that this process does itself, and the queue of operations that have to wait.
#include "windows/window_legs.hpp"

#include <cstring>

#include <c10/util/Exception.h>

#include "core/copy.hpp"
#include "core/failure.hpp"

namespace fog {

void Window::DirectLeg::start(Part part) {
  auto& mutex = *neighbor_.mutex_there;
  std::unique_lock<std::mutex> lock(queue_mutex_);
  const bool first = !running_;
  const bool locks = needs_mutex(part);
  const bool locked = first && locks && mutex.try_lock();
  if (!first || (locks && !locked)) {
    const auto op = part.op;
    queue_.push_back(std::move(part));
    if (first) {
      try {
        window_.group_->engine.run_callbacks([this, window = window_.shared_from_this()] { run_queue(); }, Engine::Refused::kThrow);
      } catch (const std::exception& refusal) {
        queue_.pop_back(); // still the last part: no other thread runs the queue
        window_.refused(name_of(op), refusal);
      }
      running_ = true;
    }
    lock.unlock();
    if (mutex.held_here()) { // the queue waits for a mutex of this thread, so no other thread can run it
      while (run_first(true, nullptr, nullptr)) {
      }
    }
    return;
  }
  lock.unlock();
  perform(part, nullptr, [&] {
    if (locked) {
      mutex.unlock();
    }
  });
}

void Window::DirectLeg::perform(Part& part, std::exception_ptr error, const std::function<void()>& between) {
  const auto call = part.call; // execute() may move the part
  bool done = true;
  if (!error) {
    try {
      done = execute(part);
    } catch (...) {
      error = std::current_exception();
    }
  }
  between();
  if (done) {
    call->finish(error);
  }
}

void Window::DirectLeg::run_queue() {
  while (true) {
    std::unique_lock<std::mutex> lock(queue_mutex_);
    if (queue_.empty()) {
      running_ = false;
      return;
    }
    const bool mutex = needs_mutex(queue_.front());
    const auto deadline = queue_.front().deadline;
    const auto call = queue_.front().call;
    lock.unlock();
    std::exception_ptr error;
    bool locked = false;
    if (mutex) {
      try {
        window_.lock(*neighbor_.mutex_there, neighbor_.rank, window_.group_->rank, deadline);
        locked = true;
      } catch (...) {
        error = std::current_exception();
      }
    }
    run_first(locked, error ? call.get() : nullptr, error);
    if (locked) {
      neighbor_.mutex_there->unlock();
    }
  }
}

bool Window::DirectLeg::run_first(bool locked, const Call* failed, std::exception_ptr error) {
  std::unique_lock<std::mutex> turn(turn_);
  std::unique_lock<std::mutex> lock(queue_mutex_);
  if (queue_.empty()) {
    return false;
  }
  const auto& first = queue_.front();
  if (error ? first.call.get() != failed : needs_mutex(first) && !locked) { // another thread has run the expected part
    return false;
  }
  auto part = std::move(queue_.front());
  queue_.pop_front();
  lock.unlock();
  bool last = false;
  perform(part, std::move(error), [&] {
    lock.lock();
    last = queue_.empty();
    lock.unlock();
    turn.unlock();
  });
  return !last;
}

namespace {

using Clock = std::chrono::steady_clock;

// Copies of a neighbor's tensor that its update() may spoil before this rank takes the mutex, which makes the neighbor
// wait.
constexpr int kTries = 2;

} // namespace

std::unique_ptr<Window::Leg> Window::MappedLeg::create(Window& window, Neighbor& neighbor, const WindowDescription& there) {
  const auto& group = window.group_;
  if (there.address.empty() || !group->engine.shares_memory(group, neighbor.rank)) {
    return nullptr;
  }
  const auto its_neighbors = all_neighbors(there.in, there.out);
  auto view = WindowView::attach(there.address, window.bytes(), there.in.size(), its_neighbors.size());
  if (!view) {
    return nullptr;
  }
  return std::unique_ptr<Leg>(
      new MappedLeg(window, neighbor, std::move(view), index_of(its_neighbors, group->rank), index_of(there.in, group->rank)));
}

RankMutex::Other Window::MappedLeg::mutex() {
  return window_.word_of(control_.mutex, PairMutex::Side::kSecond, neighbor_);
}

void Window::MappedLeg::leave() {
  control_.mutex.unlock(PairMutex::Side::kSecond);
  view_->leave(place_);
}

bool Window::MappedLeg::execute(Part& part) {
  switch (part.op) {
    case WindowOp::kGet:
      fetch(part.weight, part.deadline);
      return true;
    case WindowOp::kWrite:
      copy_bytes(view_->tensor() + part.offset, part.data.const_data_ptr(), part.data.nbytes());
      return true;
    case WindowOp::kSignal:
      control_.signal();
      return true;
    default:
      const std::lock_guard<std::mutex> writing(neighbor_.writing);
      window_.values_.write(*view_, slot_, part.op, part.weight, part.p, part.data.const_data_ptr());
      return true;
  }
}

void Window::MappedLeg::fetch(double weight, Deadline deadline) {
  auto& changes = view_->label().changes;
  window_.replace_slot(neighbor_, [&](void* out) {
    // Copies the tensor. Returns whether the copy is consistent: no update() was in progress, or its process has ended.
    const auto copy = [&](bool ended) {
      const auto before = changes.load(std::memory_order_acquire);
      window_.values_.scale(out, view_->tensor(), weight);
      std::atomic_thread_fence(std::memory_order_acquire); // pairs with the fence in change_tensor()
      return ended || (before % 2 == 0 && changes.load(std::memory_order_relaxed) == before);
    };
    bool whole = false;
    for (int tries = 0; tries < kTries && !whole && changes.load(std::memory_order_acquire) % 2 == 0; ++tries) {
      whole = copy(false);
    }
    while (!whole) { // wait for the update's end; the owner does not wait forever in turn, see change_tensor()
      if (Clock::now() >= deadline || !window_.acquire(control_.tensor, PairMutex::Side::kSecond, neighbor_, deadline)) {
        window_.fail("Window.get", c10::str("timed out waiting for rank ", neighbor_.rank, " to end its update"));
      }
      whole = copy(neighbor_.ended);
      control_.tensor.unlock(PairMutex::Side::kSecond);
      if (!whole && neighbor_.lost) { // it may stand still within its update
        window_.fail("Window.get", window_.why_gone(neighbor_));
      }
    }
    return true;
  });
}

std::shared_ptr<WindowRequest> Window::MessageLeg::request(WindowOp op, std::string what) const {
  auto request = std::make_shared<WindowRequest>();
  request->group = window_.group_;
  request->window = window_.number_;
  request->peer = neighbor_.rank;
  request->op = op;
  request->what = std::move(what);
  return request;
}

void Window::MessageLeg::tell(WindowOp op) {
  WindowService::of(*window_.group_).tell(*window_.group_, window_.number_, neighbor_.rank, op);
}

void Window::MessageLeg::leave() {
  tell(WindowOp::kLeave);
}

void Window::MessageLeg::start(Part part, std::function<void()> ended) {
  const bool get = part.op == WindowOp::kGet;
  auto request = this->request(part.op, c10::str(window_.describe(name_of(part.op)), get ? " from" : " to", " rank ", neighbor_.rank));
  request->weight = part.weight;
  request->p = part.p;
  request->offset = part.offset;
  request->mutex = part.mutex;
  request->puts = part.puts;
  request->waits = part.waits;
  request->data = part.data;
  if (get) {
    request->reply_bytes = window_.bytes();
    request->take = [this, window = window_.shared_from_this(), weight = part.weight](const void* data) {
      window->replace_slot(neighbor_, [&](void* out) {
        window->values_.scale(out, data, weight);
        return true;
      });
    };
  }
  request->done = [call = part.call, ended = std::move(ended)](const std::exception_ptr& error) {
    if (ended) {
      ended();
    }
    Call::finish_from_engine(call, error);
  };
  WindowService::of(*window_.group_).request(request, part.timeout);
}

RankMutex::Other Window::MessageLeg::mutex() {
  RankMutex::Other other;
  other.acquire = [this](Deadline deadline) { return acquire(deadline); };
  other.try_acquire = [] { return false; };
  other.release = [this] {
    if (!window_.left_) {
      try {
        tell(WindowOp::kUnlock);
      } catch (const std::exception&) { // the peer has gone, and the mutex with it
      }
    }
  };
  return other;
}

// The owner's engine holds the mutex for this rank.
bool Window::MessageLeg::acquire(Deadline deadline) {
  auto& service = WindowService::of(*window_.group_);
  auto request = this->request(WindowOp::kLock, c10::str(window_.describe("Window.mutex"), ", mutex of owner ", neighbor_.rank));
  request->waits = true;
  struct Answer {
    std::atomic<bool> done{false};
    std::exception_ptr error;
  };
  auto answer = std::make_shared<Answer>();
  request->done = [answer](std::exception_ptr error) {
    answer->error = std::move(error);
    answer->done = true;
  };
  service.request(request, std::chrono::ceil<Milliseconds>(deadline - std::chrono::steady_clock::now()));
  try {
    while (!window_.group_->engine.drive_until(answer->done, std::chrono::steady_clock::now() + kPollInterval)) {
      window_.check_abandoned("Window.mutex");
    }
  } catch (...) { // interrupted or failed: give the mutex back, whether this rank has it or will get it
    service.forget(*request);
    tell(WindowOp::kUnlock);
    throw;
  }
  if (answer->error) {
    std::rethrow_exception(answer->error);
  }
  return true;
}

} // namespace fog
