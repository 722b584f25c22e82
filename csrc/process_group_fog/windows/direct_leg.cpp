// Operations that this process does itself, and the queue of operations that have to wait.
#include <c10/util/Exception.h>

#include "windows/window_legs.hpp"

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

} // namespace fog
