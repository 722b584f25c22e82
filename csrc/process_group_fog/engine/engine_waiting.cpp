// How threads wait for the engine, what the background does, and how a process takes its leave.
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
constexpr auto kFlowSpin = std::chrono::microseconds(50); // after news of large data, before the first sleep
constexpr auto kIdleInterval = std::chrono::milliseconds(10); // and while none are
// Where the bell rings for all that comes, sleep lasts until it does, but for a look at deadlines and at other processes.
constexpr auto kLongestSleep = std::chrono::milliseconds(20);
constexpr auto kLongestIdleSleep = std::chrono::milliseconds(100);
// While another host's ranks may use this process's windows: a part of the time since the last news, within these limits.
constexpr int kListeningPart = 16;
constexpr std::chrono::nanoseconds kListeningShortest = std::chrono::microseconds(100);
constexpr std::chrono::nanoseconds kListeningLongest = std::chrono::milliseconds(5);
// A thread that asks again within this time does nothing else. When it has asked so often it sleeps before it asks again.
constexpr auto kAskingAgain = std::chrono::microseconds(5);
constexpr int kAsked = 500;
constexpr int kAskedOversubscribed = 5;
constexpr int kYields = 500; // before the first sleep that no bell would end
constexpr auto kNapWithBell = std::chrono::microseconds(100);
constexpr auto kNap = std::chrono::microseconds(20);
constexpr auto kAnswerTime = std::chrono::milliseconds(20);

} // namespace

// A thread waits: the background leaves the news to it, and looks after what is still in flight when the last one goes. All of
// `waiting_` and of the bell's `listening` is sequentially consistent: the background says that it does not listen, then looks
// whether somebody waits; the last one that waited counts itself out, then says that the background listens.
class Engine::WaiterGuard {
 public:
  explicit WaiterGuard(Engine& engine) : engine_(engine) {
    if (engine_.waiting_.fetch_add(1) == 0) {
      engine_.bell().stop_listening(Doorbell::kBackground);
    }
  }
  ~WaiterGuard() {
    if (engine_.waiting_.fetch_sub(1) == 1) {
      engine_.watch_in_background();
    }
  }

 private:
  Engine& engine_;
};

void Engine::watch_in_background() {
  const auto* transport = linked_.load();
  const bool needed =
      in_flight_.load() > 0 || failing_.load() || service_busy_.load() || (transport != nullptr && transport->waiting_for_space());
  if (!needed || waiting_.load() > 0) {
    return;
  }
  bell().listen(Doorbell::kBackground);
  if (must_poll_.load() || (transport != nullptr && transport->news())) { // which came before anybody listened
    bell().wake(Doorbell::kBackground);
  }
}

bool Engine::drive_until(const std::atomic<bool>& done, Clock::time_point deadline) {
  check_not_forked();
  const WaiterGuard guard(*this);
  Backoff backoff(oversubscribed_);
  FlowPace pace;
  Clock::time_point news;
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
      unlock_and_deliver(lock);
    }
    if (done.load(std::memory_order_acquire)) { // as after the first round of most small operations: no look at the clock
      break;
    }
    const auto now = Clock::now();
    if (now >= deadline) {
      return done.load(std::memory_order_acquire);
    }
    if (first) {
      news = now;
      next_interrupt_check = now + kInterruptInterval;
    } else if (now >= next_interrupt_check) {
      next_interrupt_check = now + kInterruptInterval;
      if (interrupt_check_) {
        interrupt_check_();
      }
    }
    if (progressed) {
      backoff.reset();
      news = now;
      continue;
    }
    const auto flow = flow_.load();
    if (flow == Transport::Flow::kMoves) {
      pace.moved();
      sched_yield();
      continue;
    }
    if (flow == Transport::Flow::kStill) {
      if (now - news < kFlowSpin) {
        sched_yield();
      } else {
        sleep_until_news(done, std::min<std::chrono::nanoseconds>(pace.nap(now - news), deadline - now));
      }
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
    if (bell_rings && !(transport != nullptr && transport->waiting_for_space())) { // space may have come before this listens
      pause = kLongestSleep;
    }
    sleep_until_news(done, std::min<std::chrono::nanoseconds>(pause, deadline - now));
  }
  return true;
}

void Engine::sleep_until_news(const std::atomic<bool>& done, std::chrono::nanoseconds limit) {
  ++sleepers_; // before the look at `done`; wake_waiters() looks at this after it was set
  const auto ticket = bell().listen(Doorbell::kWaiter);
  const auto* transport = linked_.load();
  if (!done.load() && (transport == nullptr || !transport->news())) {
    bell().sleep(Doorbell::kWaiter, ticket, limit);
  }
  --sleepers_;
}

void Engine::drive_once(const std::atomic<bool>& done) {
  check_not_forked();
  thread_local Clock::time_point last;
  thread_local int asked = 0; // in a row
  asked = Clock::now() - last > kAskingAgain ? 1 : asked + 1; // else it did something meanwhile, or had lost its core
  // What has no bell, or has rung it. The background looks at everything else, and at this as well.
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
      if (must_poll_.load() && asked <= most + kYields) { // nothing would end a sleep
        sched_yield();
      } else {
        sleep_until_news(done, must_poll_.load() ? kNap : kNapWithBell);
      }
    });
    look();
  }
  last = Clock::now();
}

// Sleeps until a message comes, but not longer than `limit`.
void Engine::sleep_until_message(std::chrono::nanoseconds limit) {
  const auto ticket = bell().listen(Doorbell::kWaiter);
  const auto* transport = linked_.load();
  if (transport == nullptr || !transport->news()) {
    bell().sleep(Doorbell::kWaiter, ticket, limit);
  }
}

bool Engine::busy() const {
  return in_flight_ > 0 || failing_ || service_->busy() || (transport_ && transport_->sending());
}

void Engine::background() {
  c10::setThreadName("fog_progress");
  Backoff backoff(true);
  FlowPace pace;
  while (!stopping_.load()) {
    const auto ticket = bell().listen(Doorbell::kBackground);
    std::chrono::nanoseconds pause = kLongestSleep;
    if (waiting_.load() > 0) {
      bell().stop_listening(Doorbell::kBackground);
      if (waiting_.load() == 0) {
        continue; // the last one has left meanwhile, and counts on this thread
      }
    } else {
      Lock lock(mutex_);
      const bool progressed = drive(lock);
      const bool more = busy();
      const bool poll = transport_ && transport_->must_poll();
      const bool listening = service_->listening();
      const auto quiet = Clock::now() - last_news_;
      unlock_and_deliver(lock);
      completions_.grow();
      if (progressed) {
        backoff.reset();
        continue;
      }
      if (!more) {
        // Nothing of this process is in flight. Over MPI other ranks may still have things to say, and MPI may hold messages
        // that it calls sent; a look every few milliseconds costs next to nothing. On this host whoever needs this process
        // wakes it.
        if (!listening) {
          bell().stop_listening(Doorbell::kBackground);
        }
        if (in_flight_.load() > 0 || service_busy_.load()) {
          continue; // since a moment ago
        }
        pause = poll ? kIdleInterval : kLongestIdleSleep;
        if (poll && listening) {
          pause = std::clamp<std::chrono::nanoseconds>(quiet / kListeningPart, kListeningShortest, kListeningLongest);
        }
        backoff.reset();
      } else if (const auto flow = flow_.load(); flow == Transport::Flow::kMoves) {
        pace.moved();
        sched_yield(); // who computes beside it has the core while nothing moves
        continue;
      } else if (flow == Transport::Flow::kStill) {
        pause = std::max<std::chrono::nanoseconds>(pace.nap(quiet), kBackgroundInterval);
      } else if (poll) {
        pause = std::max<std::chrono::nanoseconds>(backoff.pause(false), kBackgroundInterval);
      }
    }
    if (!stopping_.load()) {
      bell().sleep(Doorbell::kBackground, ticket, pause);
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
    if (lost_.count(peer) == 0 && departed_.count(peer) == 0) {
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
  // MPI may call a message sent and still hold it in this process. So this waits until each peer that it went to by MPI has said that it
  // has taken the goodbye, or has ended; after a failure only for a moment. On this host what was written stays.
  auto everyone_knows = [&] {
    return std::all_of(spoken_with.begin(), spoken_with.end(), [this](PeerId peer) {
      return lost_.count(peer) > 0 || departed_.count(peer) > 0 || released_by_.count(peer) > 0 ||
          (transport_->shares_memory(peer) && !transport_->waits_for_space(peer));
    });
  };
  const auto limit = Clock::now() + (unhealthy_ ? std::chrono::milliseconds(200) : std::chrono::milliseconds(kLeaveTimeout));
  Backoff backoff(true);
  while (!everyone_knows() && Clock::now() < limit) {
    if (drive(lock)) {
      backoff.reset();
    }
    unlock_and_deliver(lock);
    const auto pause = backoff.pause(false);
    if (pause.count() > 0) {
      sleep_until_message(pause);
    }
    lock.lock();
  }
  for (const auto end = Clock::now() + kAnswerTime; elsewhere && Clock::now() < end;) { // for this rank's own answers
    drive(lock);
    unlock_and_deliver(lock);
    sleep_until_message(std::chrono::milliseconds(1));
    lock.lock();
  }
  const bool healthy = !unhealthy_ && !transport_->has_sums_in_flight(); // which MPI's end might wait for
  lock.unlock();
  watchdog_.stop();
  return healthy;
}

} // namespace fog
