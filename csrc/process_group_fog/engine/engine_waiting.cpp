// How threads wait for the engine, the background thread, and the shutdown of a process.
#include <unistd.h>

#include <algorithm>

#include <c10/util/thread_name.h>

#include "core/python_lock.hpp"
#include "engine/backoff.hpp"
#include "engine/engine.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kInterruptInterval = std::chrono::milliseconds(50);
constexpr auto kBackgroundInterval = std::chrono::microseconds(100); // between polls while operations are in flight
constexpr auto kIdleInterval = std::chrono::milliseconds(10); // between polls while no operations are in flight
constexpr auto kLongestIdleSleep = std::chrono::milliseconds(100);
// The time between polls while ranks of other hosts may use this process's windows: a fraction of the time since the
// last news, within these limits.
constexpr int kListeningPart = 16;
constexpr std::chrono::nanoseconds kListeningShortest = std::chrono::microseconds(100);
constexpr std::chrono::nanoseconds kListeningLongest = std::chrono::milliseconds(5);
// While threads of the program wait, one after the other, and ranks of other hosts may use this process's windows: a
// request that comes between two waits is served after this time at the latest.
constexpr auto kDoze = std::chrono::milliseconds(1);
// Between two calls within this time, a thread does nothing but ask for completion. After this many such calls in a row
// it sleeps before it asks again.
constexpr auto kAskingAgain = std::chrono::microseconds(5);
constexpr int kAsked = 500;
constexpr int kAskedOversubscribed = 5;
constexpr int kYields = 500; // before the first sleep, if news may come without a bell
constexpr auto kNapWithBell = std::chrono::microseconds(100);
constexpr auto kNap = std::chrono::microseconds(20);
constexpr auto kAnswerTime = std::chrono::milliseconds(20);

} // namespace

bool Engine::is_main_thread() {
  return gettid() == getpid();
}

// What is left of the operations that a driving thread has completed. Destroying them may take as long as another thread
// holds Python's lock: the last reference to a tensor that Python knows takes it. So the thread does that when it drives
// no more, or leaves it to another one.
class Engine::Remains {
 public:
  explicit Remains(Engine& engine) : engine_(engine) {}
  void add(Outbox outbox) noexcept {
    try {
      if (!outbox.empty()) {
        all_.push_back(std::move(outbox));
      }
    } catch (const std::bad_alloc&) { // it is destroyed here
    }
  }
  void leave_to_another() noexcept {
    try {
      if (!all_.empty()) {
        engine_.completions_.release(std::make_shared<std::vector<Outbox>>(std::exchange(all_, {})));
      }
    } catch (const std::bad_alloc&) {
    }
  }

 private:
  Engine& engine_;
  std::vector<Outbox> all_;
};

// Registers a waiting thread. The background thread leaves the progress to waiting threads and continues when the last
// one goes. All accesses to `waiting_` and to the bell's `listening` are sequentially consistent: the background thread
// first says that it does not listen, then checks for waiting threads; the last waiting thread first decrements the
// count, then says that the background thread listens.
class Engine::WaiterGuard {
 public:
  explicit WaiterGuard(Engine& engine) : engine_(engine), pulse_(*engine.pulse_.load()) {
    pulse_.calls.fetch_add(1, std::memory_order_relaxed);
    pulse_.waiting.fetch_add(1, std::memory_order_relaxed);
    drive();
  }
  ~WaiterGuard() {
    if (slept_) {
      engine_.gaps_.resume(Clock::now());
    }
    pulse_.calls.fetch_add(1, std::memory_order_relaxed);
    pulse_.waiting.fetch_sub(1, std::memory_order_relaxed);
    leave_to_others();
  }
  // Meanwhile this thread does not count as one that drives.
  void check_interrupt() {
    leave_to_others();
    engine_.interrupt_check_();
    drive();
  }
  // The wait takes so long that its time counts.
  void sleeps() {
    slept_ = true;
  }

 private:
  void drive() {
    drives_ = true;
    if (engine_.waiting_.fetch_add(1) == 0) {
      engine_.bell().stop_listening(Doorbell::kBackground);
    }
  }
  void leave_to_others() {
    if (std::exchange(drives_, false) && engine_.waiting_.fetch_sub(1) == 1) {
      engine_.watch_in_background();
    }
  }

  Engine& engine_;
  Pulse& pulse_;
  bool drives_ = false;
  bool slept_ = false;
};

void Engine::watch_in_background() {
  auto* transport = linked_.load();
  const bool needed =
      in_flight_.load() > 0 || failing_.load() || service_busy_.load() || (transport != nullptr && transport->waiting_for_space());
  if (waiting_.load() > 0) {
    return;
  }
  if (!needed) {
    if (service_listens_.load() && !dozes_.load()) { // it may sleep long, and has not asked the sockets to wake it
      bell().wake(Doorbell::kBackground);
    }
    return;
  }
  bell().listen(Doorbell::kBackground);
  if (transport != nullptr) { // sockets ring once for each sleep, and a waiting thread may have heard it instead
    transport->before_sleep();
  }
  // messages that came before the background thread listened
  if (must_poll_.load() || (transport != nullptr && transport->news())) {
    bell().wake(Doorbell::kBackground);
  }
}

bool Engine::drive_until(const std::atomic<bool>& done, Clock::time_point deadline) {
  check_not_forked();
  Remains remains(*this);
  WaiterGuard guard(*this);
  Backoff backoff(oversubscribed_);
  Clock::time_point next_interrupt_check;
  for (bool first = true; !done.load(std::memory_order_acquire); first = false) {
    if (!must_poll_.load()) {
      const auto* transport = linked_.load();
      backoff.spin([&] { return done.load(std::memory_order_acquire) || (transport != nullptr && transport->news()); });
    }
    bool progressed = false;
    Lock lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) {
      progressed = drive(lock);
      remains.add(unlock_and_deliver(lock));
    }
    // true after the first round of most small operations: saves reading the clock
    if (done.load(std::memory_order_acquire)) {
      break;
    }
    const auto now = Clock::now();
    if (now >= deadline) {
      return done.load(std::memory_order_acquire);
    }
    if (first) {
      guard.sleeps();
      next_interrupt_check = now + kInterruptInterval;
    } else if (now >= next_interrupt_check) {
      next_interrupt_check = now + kInterruptInterval;
      remains.leave_to_another();
      if (interrupt_check_ && is_main_thread()) {
        guard.check_interrupt();
      }
    }
    if (progressed) {
      backoff.reset();
      continue;
    }
    if (data_moves_.load()) {
      sched_yield();
      continue;
    }
    if (backoff.spins(now)) {
      continue;
    }
    const bool bell_rings = !must_poll_.load();
    auto pause = backoff.pause(bell_rings);
    if (pause.count() == 0) {
      continue;
    }
    const auto* transport = linked_.load();
    // without a bell for it, space may have become available before this thread listened
    if (bell_rings && !(transport != nullptr && transport->waiting_for_space())) {
      pause = longest_sleep_.load();
    }
    sleep_until_news(done, std::min<std::chrono::nanoseconds>(pause, deadline - now));
  }
  return true;
}

void Engine::sleep_until_news(const std::atomic<bool>& done, std::chrono::nanoseconds limit) {
  ++sleepers_; // Increment before the check of `done`: wake_waiters() reads the count after `done` was set.
  const auto ticket = bell().listen(Doorbell::kWaiter);
  auto* transport = linked_.load();
  if (transport != nullptr) {
    transport->before_sleep();
  }
  if (!done.load() && (transport == nullptr || !transport->news())) {
    bell().sleep(Doorbell::kWaiter, ticket, limit);
  }
  --sleepers_;
}

void Engine::drive_once(const std::atomic<bool>& done) {
  check_not_forked();
  note_call();
  thread_local Clock::time_point last;
  thread_local int asked = 0; // calls in a row
  // otherwise the thread did other work, or had lost its core
  asked = Clock::now() - last > kAskingAgain ? 1 : asked + 1;
  // Makes progress if messages may have come without a bell, or have rung it. The background thread does this too, and
  // everything else.
  const auto look = [&] {
    const auto* transport = linked_.load();
    if (!must_poll_.load() && !failing_.load() && (transport == nullptr || (!transport->news() && !transport->waiting_for_space()))) {
      return;
    }
    without_python_lock([&] {
      Lock lock(mutex_, std::try_to_lock);
      if (lock.owns_lock()) {
        drive(lock);
        unlock_and_deliver(lock);
      }
    });
  };
  look();
  const int most = oversubscribed_ ? kAskedOversubscribed : kAsked;
  if (!done.load() && asked > most) {
    without_python_lock([&] {
      if (must_poll_.load() && asked <= most + kYields) { // not all news would end a sleep
        sched_yield();
      } else {
        sleep_until_news(done, must_poll_.load() ? kNap : kNapWithBell);
      }
    });
    look();
  }
  last = Clock::now();
}

bool Engine::busy() const {
  return in_flight_ > 0 || failing_ || service_->busy() || (transport_ && transport_->sending());
}

void Engine::background() {
  c10::setThreadName("fog_progress");
  Remains remains(*this);
  Backoff backoff(true);
  while (!stopping_.load()) {
    const auto ticket = bell().listen(Doorbell::kBackground);
    pulse_.load()->beats.fetch_add(1, std::memory_order_relaxed);
    std::chrono::nanoseconds pause = longest_sleep_.load();
    if (waiting_.load() > 0) {
      bell().stop_listening(Doorbell::kBackground);
      if (waiting_.load() == 0) {
        continue; // the last waiting thread has left and relies on this thread
      }
      if (service_listens_.load()) { // requests may come once it has left
        dozes_ = true;
        pause = kDoze;
      }
    } else {
      Lock lock(mutex_);
      const bool progressed = drive(lock);
      const bool more = busy();
      const bool poll = transport_ && transport_->must_poll();
      const bool listening = service_->listening();
      const auto quiet = Clock::now() - last_news_;
      remains.add(unlock_and_deliver(lock));
      remains.leave_to_another();
      completions_.grow();
      if (progressed) {
        backoff.reset();
        continue;
      }
      if (!more) {
        // Nothing of this process is in flight. But MPI may have to answer other ranks; polling every few milliseconds costs
        // next to nothing. Messages ring the bell.
        if (!listening) {
          bell().stop_listening(Doorbell::kBackground);
        }
        if (in_flight_.load() > 0 || service_busy_.load()) {
          continue; // an operation has just begun
        }
        pause = poll ? kIdleInterval : kLongestIdleSleep;
        if (poll && listening) {
          pause = std::clamp<std::chrono::nanoseconds>(quiet / kListeningPart, kListeningShortest, kListeningLongest);
        }
        backoff.reset();
      } else if (data_moves_.load()) {
        sched_yield();
        continue;
      } else if (poll) {
        pause = std::max<std::chrono::nanoseconds>(backoff.pause(false), kBackgroundInterval);
      }
    }
    if (!stopping_.load()) {
      if (auto* transport = linked_.load(); transport != nullptr && waiting_.load() == 0) {
        transport->before_sleep();
      }
      bell().sleep(Doorbell::kBackground, ticket, pause);
      dozes_ = false;
    }
  }
}

std::optional<bool> Engine::shutdown() {
  if (forked_) {
    return std::nullopt;
  }
  watchdog_.set_patience(kLeaveTimeout);
  Lock lock(mutex_);
  if (stopping_) {
    return std::nullopt;
  }
  stopping_ = true;
  mail_came_.notify_all();
  const auto groups = groups_;
  for (const auto& [id, group] : groups) {
    if (!group->operations.empty()) {
      fail(group, c10d::ErrorType::COMM_ERROR, "the program ended while operations of group '" + group->name + "' were in flight");
    }
  }
  std::vector<std::function<void()>> calls;
  for (const auto& [id, group] : groups) {
    const auto some = service_->on_closing(*group);
    calls.insert(calls.end(), some.begin(), some.end());
  }
  unlock_and_deliver(lock);
  for (const auto& call : calls) {
    call();
  }
  bell().wake(Doorbell::kBackground);
  if (thread_.joinable()) {
    thread_.join();
  }
  completions_.stop();
  if (!transport_) {
    return std::nullopt;
  }
  lock.lock();
  Header goodbye;
  goodbye.kind = MessageKind::kGoodbye;
  const auto spoken_with = transport_->spoken_with();
  bool elsewhere = false;
  for (const PeerId peer : spoken_with) {
    if (peers()[peer].is_alive()) {
      try {
        goodbye.wants_confirm = transport_->shares_memory(peer) ? 0 : 1;
        elsewhere = elsewhere || goodbye.wants_confirm != 0;
        transport_->send({{peer, 1.0, goodbye.wants_confirm != 0}}, goodbye, nullptr, Transport::Memory::kStays, nullptr);
      } catch (const std::exception&) {
        unhealthy_ = true;
      }
    }
  }
  transport_->depart();
  // The system drops what it has not sent when a process ends with messages that it has not read. So wait until each peer
  // of another host has confirmed the goodbye or has ended; after a failure, only for a moment. Messages to peers on this
  // host stay in their memory.
  auto everyone_knows = [&] {
    return std::all_of(spoken_with.begin(), spoken_with.end(), [this](PeerId peer) {
      return !peers()[peer].is_alive() || released_by_.count(peer) > 0 ||
          (transport_->shares_memory(peer) && transport_->unsent(peer) == 0);
    });
  };
  const auto drive_while = [&](std::chrono::milliseconds longest, const auto& needed) {
    const std::atomic<bool> never{false};
    Backoff backoff(true);
    for (const auto end = Clock::now() + longest; needed() && Clock::now() < end; lock.lock()) {
      if (drive(lock)) {
        backoff.reset();
      }
      unlock_and_deliver(lock);
      if (const auto pause = backoff.pause(false); pause.count() > 0) {
        sleep_until_news(never, pause);
      }
    }
  };
  drive_while(unhealthy_ ? std::chrono::milliseconds(200) : kLeaveTimeout, [&] { return !everyone_knows(); });
  drive_while(kAnswerTime, [&] { return elsewhere; }); // delivers this rank's own answers
  const bool healthy = !unhealthy_;
  lock.unlock();
  watchdog_.stop();
  return healthy;
}

} // namespace fog
