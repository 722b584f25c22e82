#include "job/mpi_watchdog.hpp"

#include <sched.h>
#include <signal.h>

#include <cstdio>
#include <system_error>

#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

namespace fog {
namespace {

// Patience is counted in looks, not in time: a process that was stopped, with all its threads, has not waited for MPI
// meanwhile.
constexpr auto kLook = std::chrono::milliseconds(100);
constexpr int kLeastLooks = 5;
constexpr int kVainLooks = 20; // further looks, after which it reports that the signal has no effect
// Does nothing unless a handler is installed, and programs rarely install one.
constexpr int kSignal = SIGURG;

std::atomic<Watchdog*> active{nullptr};
struct sigaction others_action = {};

} // namespace

void Watchdog::start() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (thread_of_watch_.joinable() || stopping_) {
    return;
  }
  try {
    thread_of_watch_ = std::thread([this] { watch(); });
  } catch (const std::system_error& error) {
    C10_THROW_ERROR(DistBackendError, c10::str("fog: the system refuses this process a thread: ", error.what()));
  }
}

void Watchdog::set_patience(std::chrono::milliseconds patience) {
  patience_ms_ = std::min(patience_ms_.load(), patience.count());
}

void Watchdog::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_of_watch_.joinable()) {
    thread_of_watch_.join();
  }
}

void Watchdog::throw_ended() {
  const int peer = peer_.load();
  reason_ = c10::str(
      "fog: ", name_.load(), peer >= 0 ? c10::str(" with rank ", peer, " of MPI's world") : "",
      " did not return in time and was ended by fog; MPI cannot be used any more in this process");
  broken_ = true;
  await_signal();
  throw_broken();
}

void Watchdog::throw_broken() const {
  C10_THROW_ERROR(DistBackendError, reason_);
}

// The thread must not end before the watchdog has finished with it.
void Watchdog::await_signal() const {
  while (signalled_.load(std::memory_order_acquire) != number_) {
    sched_yield();
  }
}

void Watchdog::on_signal(int signal, siginfo_t* info, void* context) {
  auto* watchdog = active.load();
  if (pthread_equal(watchdog->thread_.load(), pthread_self()) != 0 && (watchdog->state_.load() & (kStates - 1)) == kCondemned) {
    watchdog->state_.store((watchdog->state_.load() & ~uint64_t(kStates - 1)) | kOutside);
    _longjmp(watchdog->place_, 1);
  }
  if ((others_action.sa_flags & SA_SIGINFO) != 0) {
    others_action.sa_sigaction(signal, info, context);
  } else if (others_action.sa_handler != SIG_DFL && others_action.sa_handler != SIG_IGN) {
    others_action.sa_handler(signal);
  }
}

void Watchdog::end_call(uint64_t number) {
  signalled_ = 0; // the watchdog may have sent a signal for this call before
  auto expected = number | kInside;
  if (!state_.compare_exchange_strong(expected, number | kCondemned) && expected != (number | kCondemned)) {
    signalled_ = number; // the call has returned
    return;
  }
  if (active.exchange(this) == nullptr) {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_NODEFER; // the handler does not return, so the signal must not stay blocked
    sigemptyset(&action.sa_mask);
    sigaction(kSignal, &action, &others_action);
  }
  pthread_kill(thread_.load(), kSignal);
  signalled_ = number;
}

void Watchdog::watch() {
  c10::setThreadName("fog_watchdog");
  uint64_t seen = 0;
  int looks = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, kLook, [this] { return stopping_; })) {
    const auto state = state_.load(std::memory_order_acquire);
    const auto number = state & ~uint64_t(kStates - 1);
    looks = (state & (kStates - 1)) != kOutside && number == seen ? looks + 1 : 0;
    seen = number;
    const bool late = std::chrono::steady_clock::now().time_since_epoch().count() >= deadline_.load() ||
        looks * kLook >= std::chrono::milliseconds(patience_ms_.load());
    if (looks < kLeastLooks || !late) {
      continue;
    }
    end_call(number);
    if (looks == kLeastLooks + kVainLooks) {
      std::fprintf(
          stderr, "fog: %s does not return, and its thread does not take signal %d, which would end it\n", name_.load(), kSignal);
    }
  }
}

} // namespace fog
