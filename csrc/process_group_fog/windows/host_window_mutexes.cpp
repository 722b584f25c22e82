#include "windows/host_window_mutexes.hpp"

#include <algorithm>

#include <c10/util/Exception.h>

#include "windows/host_window_parts.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

} // namespace

bool HostWindow::MappedMutex::acquire(Deadline deadline) {
  return window_.acquire(shared_, side_, other_, deadline);
}

bool HostWindow::MappedMutex::try_acquire() {
  return shared_.try_lock(side_);
}

void HostWindow::MappedMutex::release() {
  const std::lock_guard<std::mutex> lock(window_.leaving_); // its memory stays meanwhile
  if (!window_.left_ && !window_.group_->engine.forked()) { // else leave() has done it, or the parent will
    shared_.unlock(side_);
  }
}

void HostWindow::MappedMutex::check() {
  window_.group_->engine.check_interrupt();
}

void HostWindow::MappedMutex::time_out() {
  const bool here = side_ == PairMutex::Side::kFirst;
  const int me = window_.group_->rank;
  window_.fail(
      "win_mutex",
      c10::str("timed out waiting for the mutex of owner ", here ? me : other_.rank, " and rank ", here ? other_.rank : me));
}

bool HostWindow::RemoteMutex::acquire(Deadline deadline) {
  auto& engine = window_.group_->engine;
  auto& service = WindowService::of(*window_.group_);
  auto request = std::make_shared<WindowRequest>();
  request->group = window_.group_;
  request->window = window_.number_;
  request->peer = owner_.rank;
  request->op = WindowOp::kLock;
  request->what = c10::str(window_.describe("win_mutex"), ", mutex of owner ", owner_.rank);
  struct Answer {
    std::atomic<bool> done{false};
    std::exception_ptr error;
  };
  auto answer = std::make_shared<Answer>();
  request->done = [answer](std::exception_ptr error) {
    answer->error = std::move(error);
    answer->done = true;
  };
  service.request(request, std::chrono::ceil<Milliseconds>(deadline - Clock::now()));
  try {
    engine.drive_until(answer->done, Deadline::max());
  } catch (...) { // interrupted: whether it has it by now or will have it, it gives it back
    service.forget(*request);
    service.tell(*window_.group_, window_.number_, owner_.rank, WindowOp::kUnlock);
    throw;
  }
  if (answer->error) {
    std::rethrow_exception(answer->error);
  }
  return true;
}

bool HostWindow::RemoteMutex::try_acquire() {
  return false;
}

void HostWindow::RemoteMutex::release() {
  if (window_.left_) {
    return;
  }
  try {
    WindowService::of(*window_.group_).tell(*window_.group_, window_.number_, owner_.rank, WindowOp::kUnlock);
  } catch (const std::exception&) { // it has gone, and the mutex with it
  }
}

void HostWindow::RemoteMutex::check() {
  window_.group_->engine.check_interrupt();
}

void HostWindow::RemoteMutex::time_out() {
  window_.fail("win_mutex", c10::str("timed out waiting for the mutex of owner ", owner_.rank, " and rank ", window_.group_->rank));
}

bool HostWindow::acquire(PairMutex& mutex, PairMutex::Side side, const Neighbor& neighbor, Deadline deadline) const {
  while (!mutex.lock_or_queue(side)) { // again, as the other side may have seized it
    if (mutex.wait(side, std::min<std::chrono::nanoseconds>(kLook, deadline - Clock::now()))) {
      return true;
    }
    if (neighbor.ended) {
      mutex.seize(side);
      return true;
    }
    if (abandoned_ || Clock::now() >= deadline) {
      if (!mutex.give_up(side)) {
        return true;
      }
      check_abandoned("win_mutex");
      return false;
    }
    try {
      group_->engine.check_interrupt();
    } catch (...) {
      if (!mutex.give_up(side)) {
        mutex.unlock(side);
      }
      throw;
    }
  }
  return true;
}

std::vector<RankMutex*> HostWindow::mutexes(const char* op, std::vector<int> ranks, bool own) const {
  std::sort(ranks.begin(), ranks.end()); // by owner, then by the other
  std::vector<RankMutex*> mutexes;
  for (const int rank : ranks) {
    auto& other = neighbor(op, "ranks", rank, true, true);
    mutexes.push_back(own ? other.mutex_here.get() : other.mutex_there.get());
  }
  return mutexes;
}

void HostWindow::lock(const std::vector<int>& ranks, bool own, Milliseconds timeout) {
  constexpr const char* op = "win_mutex";
  const Use use(*this, op, For::kThisRank);
  const auto deadline = deadline_after(timeout);
  std::vector<RankMutex*> held;
  try {
    for (auto* mutex : mutexes(op, ranks, own)) {
      mutex->lock(deadline);
      held.push_back(mutex);
    }
  } catch (...) {
    for (auto* mutex : held) {
      mutex->unlock();
    }
    throw;
  }
}

void HostWindow::unlock(const std::vector<int>& ranks, bool own) {
  const auto held = mutexes("win_mutex", ranks, own);
  const bool all = std::all_of(held.begin(), held.end(), [](RankMutex* mutex) { return mutex->held_here(); });
  TORCH_CHECK_VALUE(all, "win_mutex: ranks: got some whose mutex of window '", name_, "' this thread has not locked");
  for (auto* mutex : held) {
    mutex->unlock();
  }
}

} // namespace fog
