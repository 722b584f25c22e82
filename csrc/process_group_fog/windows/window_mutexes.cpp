// The mutexes of a Window, one for each pair of an owner and a neighbor.
#include <algorithm>

#include <c10/util/Exception.h>

#include "windows/window_legs.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

} // namespace

std::unique_ptr<RankMutex> Window::make_mutex(RankMutex::Other other) const {
  return std::make_unique<RankMutex>(std::move(other), [this] { group_->engine.check_interrupt(); });
}

RankMutex::Other Window::word_of(PairMutex& word, PairMutex::Side side, const Neighbor& other) const {
  return {
      [this, &word, side, &other](Deadline deadline) { return acquire(word, side, other, deadline); },
      [&word, side] { return word.try_lock(side); },
      [this, &word, side] {
        const std::lock_guard<std::mutex> lock(leaving_); // keeps leave() from releasing the memory meanwhile
        if (!left_ && !group_->engine.forked()) { // otherwise leave() has unlocked it, or the parent will
          word.unlock(side);
        }
      }};
}

bool Window::acquire(PairMutex& mutex, PairMutex::Side side, const Neighbor& neighbor, Deadline deadline) const {
  while (!mutex.lock_or_queue(side)) { // repeats if the other side has seized the mutex
    if (mutex.wait(side, std::min<std::chrono::nanoseconds>(kPollInterval, deadline - Clock::now()))) {
      return true;
    }
    if (neighbor.ended || neighbor.lost) {
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

bool Window::holds_mutex() const {
  return std::any_of(neighbors_.begin(), neighbors_.end(), [](const auto& neighbor) {
    return neighbor->mutex_here->held_here() || neighbor->mutex_there->held_here();
  });
}

std::vector<RankMutex*> Window::mutexes(const std::vector<int>& ranks, bool own) const {
  std::vector<RankMutex*> mutexes;
  for (const int rank : ranks) {
    auto& other = neighbor("win_mutex", "ranks", rank, true, true);
    mutexes.push_back(own ? other.mutex_here.get() : other.mutex_there.get());
  }
  return mutexes;
}

void Window::lock(RankMutex& mutex, int owner, int other, Deadline deadline) const {
  if (!mutex.lock(deadline)) {
    fail("win_mutex", c10::str("timed out waiting for the mutex of owner ", owner, " and rank ", other));
  }
}

void Window::lock(const std::vector<int>& ranks, bool own, Milliseconds timeout) {
  const Use use(*this, "win_mutex", For::kThisRank);
  const auto deadline = deadline_after(timeout);
  auto sorted = ranks; // by owner, then by the other rank
  std::sort(sorted.begin(), sorted.end());
  const auto all = mutexes(sorted, own);
  size_t held = 0;
  try {
    for (; held < all.size(); ++held) {
      lock(*all[held], own ? group_->rank : sorted[held], own ? sorted[held] : group_->rank, deadline);
    }
  } catch (...) {
    for (size_t i = 0; i < held; ++i) {
      all[i]->unlock();
    }
    throw;
  }
}

void Window::release(const std::vector<int>& ranks, bool own) {
  const auto held = mutexes(ranks, own);
  const bool all = std::all_of(held.begin(), held.end(), [](RankMutex* mutex) { return mutex->held_here(); });
  TORCH_CHECK_VALUE(all, "win_mutex: ranks: got some whose mutex of window '", name_, "' this thread has not locked");
  for (auto* mutex : held) {
    mutex->unlock();
  }
}

void Window::unlock(const std::vector<int>& ranks, bool own) {
  group_->engine.check_not_forked();
  std::exception_ptr error;
  // Neighbors that get the tensor should see the changes that were made under the mutex.
  if (staging_ && own && holds_mutex() && !closed_ && is_tensor_in_place()) {
    try {
      const Use use(*this, "win_mutex", For::kThisRank);
      staging_->publish("win_mutex", deadline_after(timeout_));
    } catch (...) { // the mutexes are released in any case
      error = std::current_exception();
    }
  }
  release(ranks, own);
  if (error) {
    std::rethrow_exception(error);
  }
}

Window::Hold::~Hold() {
  if (window_ && !window_->engine().forked()) { // otherwise the parent holds it
    release();
  }
}

std::unique_ptr<Window::Hold> Window::hold(std::vector<int> ranks, bool own, Milliseconds timeout) {
  lock(ranks, own, timeout);
  return std::make_unique<Hold>(shared_from_this(), std::move(ranks), own);
}

} // namespace fog
