#include <algorithm>
#include <cstring>

#include <c10/util/Exception.h>

#include "transport/futex.hpp"
#include "windows/window_legs.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

// Copies of a neighbor's tensor that its update() may spoil before it is asked to wait.
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

void Window::MappedLeg::start(Part part) {
  auto& mutex = *neighbor_.mutex_there;
  std::unique_lock<std::mutex> lock(queue_mutex_);
  const bool first = !running_;
  const bool locked = first && part.mutex && mutex.try_lock();
  if (!first || (part.mutex && !locked)) {
    const auto op = part.op;
    queue_.push_back(std::move(part));
    if (first) {
      try {
        window_.group_->engine.run_callbacks([this, window = window_.shared_from_this()] { run_queue(); }, Engine::Refused::kThrow);
      } catch (const std::exception& refusal) {
        queue_.pop_back(); // nobody else is at it
        window_.refused(name_of(op), refusal);
      }
      running_ = true;
    }
    lock.unlock();
    if (mutex.held_here()) { // then nobody else can get at what waits for it
      while (run_first(true, nullptr, nullptr)) {
      }
    }
    return;
  }
  lock.unlock();
  std::exception_ptr error;
  try {
    execute(part);
  } catch (...) {
    error = std::current_exception();
  }
  if (locked) {
    mutex.unlock();
  }
  part.call->finish(error);
}

void Window::MappedLeg::run_queue() {
  while (true) {
    std::unique_lock<std::mutex> lock(queue_mutex_);
    if (queue_.empty()) {
      running_ = false;
      return;
    }
    const bool mutex = queue_.front().mutex;
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

bool Window::MappedLeg::run_first(bool locked, const Call* failed, std::exception_ptr error) {
  std::unique_lock<std::mutex> turn(turn_);
  std::unique_lock<std::mutex> lock(queue_mutex_);
  if (queue_.empty()) {
    return false;
  }
  const auto& first = queue_.front();
  if (error ? first.call.get() != failed : first.mutex && !locked) { // another thread has run the one that was there
    return false;
  }
  const auto part = std::move(queue_.front());
  queue_.pop_front();
  lock.unlock();
  if (!error) {
    try {
      execute(part);
    } catch (...) {
      error = std::current_exception();
    }
  }
  lock.lock();
  const bool last = queue_.empty();
  lock.unlock();
  turn.unlock();
  part.call->finish(error);
  return !last;
}

void Window::MappedLeg::execute(const Part& part) {
  switch (part.op) {
    case WindowOp::kGet:
      fetch(part.weight, part.deadline);
      return;
    case WindowOp::kWrite:
      std::memcpy(view_->tensor() + part.offset, part.data.const_data_ptr(), part.data.nbytes());
      return;
    case WindowOp::kSignal:
      control_.signal();
      return;
    default:
      const std::lock_guard<std::mutex> writing(neighbor_.writing);
      window_.values_.write(*view_, slot_, part.op, part.weight, part.p, part.data.const_data_ptr());
  }
}

void Window::MappedLeg::fetch(double weight, Deadline deadline) {
  auto& changes = view_->label().changes;
  window_.replace_slot(neighbor_, [&](void* out) {
    // Copies the tensor. True if that is whole: no update() was on its way, or is not expected to end.
    const auto copy = [&](bool ended) {
      const auto before = changes.load(std::memory_order_acquire);
      window_.values_.scale(out, view_->tensor(), weight);
      std::atomic_thread_fence(std::memory_order_acquire); // pairs with that in change_tensor()
      return ended || (before % 2 == 0 && changes.load(std::memory_order_relaxed) == before);
    };
    bool whole = false;
    for (int tries = 0; tries < kTries && !whole && changes.load(std::memory_order_acquire) % 2 == 0; ++tries) {
      whole = copy(false);
    }
    while (!whole) { // rather wait for its end, though the owner does not wait for ever: see change_tensor()
      if (Clock::now() >= deadline || !window_.acquire(control_.tensor, PairMutex::Side::kSecond, neighbor_, deadline)) {
        window_.fail("win_get", c10::str("timed out waiting for rank ", neighbor_.rank, " to end its update"));
      }
      whole = copy(neighbor_.ended);
      control_.tensor.unlock(PairMutex::Side::kSecond);
    }
  });
}

} // namespace fog
