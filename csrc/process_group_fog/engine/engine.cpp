#include "engine/engine.hpp"

#include <algorithm>
#include <new>
#include <system_error>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/StringUtil.h>

#include "core/deadline.hpp"
#include "core/failure.hpp"
#include "core/settings.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kCheckInterval = std::chrono::milliseconds(2); // between checks of deadlines and of other processes
constexpr int kMostLeftOut = 8; // consecutive checks to skip while there is progress
constexpr const char* kNoMemory = "fog's engine lacks memory (std::bad_alloc)";

} // namespace

Engine::Engine() : last_news_(Clock::now()), next_check_(Clock::now()) {}

Engine::~Engine() = default;

void Engine::use(std::unique_ptr<Transport> transport) {
  const Lock lock(mutex_);
  transport_ = std::move(transport);
  linked_ = transport_.get();
  transport_->pulse().suspended = early_pulse_.suspended.load();
  pulse_ = &transport_->pulse();
  early_bell_.wake(Doorbell::kBackground); // the background thread has to listen to the transport's bell from now on
}

void Engine::check_not_forked() const {
  TORCH_CHECK(
      !forked_,
      "fog: this process was forked from one that used fog; it can neither use the parent's groups nor create its own (start ranks with spawn or exec)");
}

void Engine::run_callbacks(std::function<void()> callbacks, Refused refused) {
  completions_.run(std::move(callbacks), refused);
}

void Engine::start_threads(std::chrono::milliseconds patience) {
  used_ = true;
  try {
    completions_.start();
    watchdog_.set_patience(patience);
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { background(); });
    }
  } catch (const std::system_error& error) {
    C10_THROW_ERROR(DistBackendError, c10::str("fog: the system refuses this process a thread: ", error.what()));
  }
}

bool Engine::progress() {
  Lock lock(mutex_);
  const bool progressed = drive(lock);
  unlock_and_deliver(lock);
  return progressed;
}

void Engine::look_for_ended_peers() {
  constexpr int kLooks = 16; // enough to read what peers have sent while this process was stopped
  auto lock = locked();
  for (int looks = 0; transport_ && looks < kLooks && take_messages(); ++looks) {
  }
  check_peers(lock);
  unlock_and_deliver(lock);
}

Engine::Lock Engine::locked() {
  check_not_forked();
  return Lock(mutex_);
}

Engine::Lock Engine::lock_by(Deadline deadline) {
  check_not_forked();
  Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    watchdog_.expect(deadline);
    lock.lock();
  }
  return lock;
}

void Engine::submit(
    const std::shared_ptr<Group>& group,
    const std::shared_ptr<Operation>& operation,
    std::chrono::milliseconds timeout,
    const std::string& name,
    bool waits) {
  note_call();
  timeout = within_reach(timeout);
  const auto deadline = deadline_after(timeout);
  if (observed()) {
    operation->times = std::make_unique<OperationTimes>(Clock::now());
  }
  auto lock = lock_by(deadline);
  check_open(*group);
  if (!group->failure.reason.empty()) {
    C10_THROW_ERROR(DistBackendError, "fog: group '" + group->name + "' has failed and takes no more work: " + group->failure.reason);
  }
  const auto kind = operation->signature().kind;
  uint64_t key = 0;
  NameTable::Use use;
  if (kind == OpKind::kPointToPoint) {
    key = operation->tag();
  } else if (name.empty()) {
    key = group->next_key++;
  } else {
    key = key_of_name(kind, name);
    const auto in_flight = [&](uint64_t other) { return group->by_key.count(other) > 0; };
    TORCH_CHECK_VALUE(
        !in_flight(key), "name: got '", name, "', which names an operation still in flight; wait for it or use another name");
    use = group->names.next(key, in_flight);
  }
  watchdog_.expect(deadline);
  group->operations.insert(operation);
  try {
    if (kind != OpKind::kPointToPoint) {
      group->by_key.emplace(key, operation);
    }
  } catch (const std::bad_alloc&) {
    group->operations.erase(operation);
    throw;
  }
  ++in_flight_;
  try {
    if (operation->times) {
      operation->times->start();
    }
    if (record_) {
      operation->flight = record_->begin(operation->signature(), group->name, group->rank, group->sequence, key);
    }
    operation->begin(group, key, group->sequence++, timeout, deadline, use);
    if (kind != OpKind::kPointToPoint) {
      const auto found = group->early.find(key);
      if (found != group->early.end()) {
        auto& messages = found->second;
        for (auto message = messages.begin(); message != messages.end();) {
          if (operation->owns(message->source, message->header)) {
            operation->on_message(message->source, message->header, message->data.data());
            message = messages.erase(message);
          } else { // belongs to a later use of the name
            ++message;
          }
        }
        if (messages.empty()) {
          group->early.erase(found);
        }
      }
    } else if (operation->receives()) {
      const auto found = std::find_if(group->unexpected.begin(), group->unexpected.end(), [&](const EarlyMessage& message) {
        return operation->matches(message.source, message.header);
      });
      if (found == group->unexpected.end()) {
        group->posted.push_back(operation);
      } else {
        const auto message = std::move(*found);
        group->unexpected.erase(found);
        operation->on_message(message.source, message.header, message.data.data());
      }
    }
    if (!group->gone.empty()) {
      for (const int peer : operation->awaited(false)) {
        group->check_present(peer);
      }
    }
    make_ready(operation);
    drive(lock);
    if (peers_.any_lost() && !operation->ended() && !operation->computing) {
      // The operation may have begun with a message of a process that has ended since and sends no more.
      for (const int peer : operation->awaited()) {
        if (peers()[group->members[peer].peer_id].is_lost()) {
          group->check_present(peer);
        }
      }
    }
  } catch (const std::exception& error) {
    fail(operation, error);
  }
  const auto remains = unlock_and_deliver(lock); // its end may have to wait for Python's lock
  if (!waits) {
    watch_in_background();
  }
}

bool Engine::drive(Lock& lock) {
  try {
    if (failing_) {
      fail_everything(kNoMemory, true);
    }
    return make_progress(lock);
  } catch (const std::exception& error) {
    if (!lock.owns_lock()) {
      lock.lock();
    }
    failing_ = true;
    try {
      const bool no_memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
      fail_everything(no_memory ? kNoMemory : "fog's engine failed: " + message_of(error), true);
    } catch (const std::exception&) { // the next round tries again
    }
    return false;
  }
}

bool Engine::make_progress(Lock& lock) {
  pulse_.load(std::memory_order_relaxed)->beats.fetch_add(1, std::memory_order_relaxed);
  bool progressed = false;
  if (transport_) {
    progressed = take_messages();
    if (watchdog_.broken() && transport_->give_up()) {
      unhealthy_ = true;
      fail_everything(watchdog_.reason(), false);
    }
    auto released = transport_->take_released();
    std::move(released.begin(), released.end(), std::back_inserter(outbox_.released));
  }
  progressed = progressed || !ready_.empty();
  step_ready(lock);
  progressed = step_service(lock) || progressed;
  if (!failed_.empty() && transport_) {
    take_messages(); // a peer that has given up an operation has sent the reason before: handle it first
  }
  // News from other ranks may be about the end of a process: this rank should detect and report that end too.
  if (!afterwards_.empty()) {
    check_peers(lock);
  }
  // Operations that had received everything are complete now, so the news of failures and ends affects only the others.
  for (const auto& act : std::exchange(afterwards_, {})) {
    act();
  }
  for (const auto& [operation, reason] : std::exchange(failed_, {})) {
    fail(operation->group(), c10d::ErrorType::COMM_ERROR, reason);
  }
  if (early_load_.changed()) {
    tell_early_load();
  }
  const auto now = Clock::now();
  if (now >= next_check_) {
    next_check_ = now + kCheckInterval;
    // While there is progress, the checks can wait: a small operation after a pause should not pay for them.
    if (!progressed || ++checks_left_out_ > kMostLeftOut) {
      checks_left_out_ = 0;
      check_deadlines();
      check_peers(lock);
      judge_peers(now);
    }
  }
  must_poll_ = transport_ && transport_->must_poll();
  data_moves_ = transport_ && transport_->data_moves();
  service_busy_ = service_->busy();
  service_listens_ = service_->listening();
  if (progressed) {
    last_news_ = now;
  }
  return progressed;
}

bool Engine::take_messages() {
  try {
    return transport_->poll();
  } catch (const c10::DistBackendError& error) { // the transport itself failed: no operation can continue
    unhealthy_ = true;
    fail_everything(message_of(error), false);
    return false;
  }
}

bool Engine::step_service(Lock& lock) {
  if (!service_->busy()) {
    return false;
  }
  bool progressed = false;
  service_->advance();
  while (const auto task = service_->next_task()) {
    progressed = true;
    lock.unlock();
    task->run();
    lock.lock();
    service_->finish(task);
    service_->advance();
  }
  return progressed;
}

void Engine::step_ready(Lock& lock) {
  while (!ready_.empty()) {
    const auto operation = ready_.front();
    outbox_.retired.push_back(operation); // the last reference must not be released under the lock
    ready_.pop_front();
    operation->queued = false;
    if (operation->ended() || operation->computing || operation->failing) {
      continue;
    }
    try {
      switch (operation->step()) {
        case Operation::Action::kWait:
          break;
        case Operation::Action::kDone:
          complete(operation, nullptr);
          break;
        case Operation::Action::kCompute: {
          operation->computing = true;
          lock.unlock();
          const bool computes = operation->computes();
          const auto begin = operation->times ? Clock::now() : Clock::time_point();
          std::exception_ptr error;
          try {
            run_profiled(*operation, computes);
          } catch (...) {
            error = std::current_exception();
          }
          lock.lock();
          if (operation->times) {
            operation->times->ran(begin, computes);
          }
          operation->computing = false;
          try {
            operation->settle();
          } catch (...) {
            error = error ? error : std::current_exception();
          }
          if (operation->ended()) { // the operation has failed meanwhile; this thread no longer uses its memory
            lock.unlock();
            operation->finish(std::exchange(operation->late_error, nullptr));
            lock.lock();
            break;
          }
          if (error) {
            std::rethrow_exception(error);
          }
          make_ready(operation);
          break;
        }
      }
    } catch (const std::exception& error) {
      operation->failing = true;
      failed_.emplace_back(operation, operation->describe() + ": " + message_of(error));
    }
  }
}

void Engine::complete(const std::shared_ptr<Operation>& operation, std::exception_ptr error) {
  if (operation->ended()) {
    return;
  }
  const bool failed = error != nullptr;
  if (failed && transport_) {
    transport_->withdraw(*operation); // stops peers from reading its memory; step_ready() does the rest
  }
  if (operation->computing) {
    operation->late_error = std::move(error);
  } else {
    outbox_.completions.push_back({operation, std::move(error)});
  }
  const auto& group = operation->group();
  if (record_) {
    record_->end(operation->flight, failed);
  }
  if (operation->times) {
    end_times(*operation, failed);
  }
  // The rest allocates no memory, so it cannot fail.
  operation->retire();
  group->operations.erase(operation);
  const auto found = group->by_key.find(operation->key());
  if (found != group->by_key.end() && found->second == operation) {
    group->by_key.erase(found);
  }
  --in_flight_;
}

Engine::Outbox Engine::unlock_and_deliver(Lock& lock) {
  auto outbox = std::exchange(outbox_, {});
  outbox.of_service = service_->take_released();
  outbox.calls = service_->take_calls();
  lock.unlock();
  for (const auto& call : outbox.calls) {
    report_unowned_failure("the end of a window's operation", call);
  }
  for (const int peer_id : outbox.ended) {
    report_unowned_failure("the end of a process", [&] { ended_listener_.load()(peer_id); });
  }
  for (auto& completion : outbox.completions) {
    report_unowned_failure("the end of an operation", [&] { completion.operation->finish(std::move(completion.error)); });
  }
  if (!outbox.calls.empty()) {
    wake_waiters(); // a call may have completed what another thread waits for
  }
  return outbox;
}

void Engine::wake_waiters() {
  if (sleepers_.load() > 0) {
    bell().wake(Doorbell::kWaiter);
  }
}

bool Engine::shares_memory(const std::shared_ptr<Group>& group, int peer) {
  const auto lock = locked();
  return transport_ && transport_->shares_memory(group->members[peer].peer_id);
}

std::string Engine::way_to(const std::shared_ptr<Group>& group, int peer) {
  const auto lock = locked();
  return transport_ ? transport_->way_to(group->members[peer].peer_id) : "";
}

void Engine::check_open(const Group& group) const {
  if (group.closed || stopping_) {
    C10_THROW_ERROR(DistBackendError, "fog: group '" + group.name + "' was destroyed");
  }
}

void Engine::begin(Deadline deadline, const std::function<void()>& act, bool waits) {
  auto lock = lock_by(deadline);
  watchdog_.expect(deadline);
  act();
  service_busy_ = true;
  drive(lock);
  const auto remains = unlock_and_deliver(lock);
  if (!waits) {
    watch_in_background();
  }
}

void Engine::tell(const std::function<void()>& act) {
  if (!forked_) {
    Lock lock(mutex_);
    act();
    unlock_and_deliver(lock);
  }
}

void Engine::listen() {
  bell().wake(Doorbell::kBackground);
}

Peer Engine::peer(int peer_id) {
  const auto lock = locked();
  return peers()[peer_id];
}

Engine::Bookkeeping Engine::bookkeeping() {
  const auto lock = locked();
  Bookkeeping sizes{0, closed_groups_.size(), early_load_.bytes()};
  for (const auto& [id, group] : groups_) {
    sizes.names += group->names.size();
  }
  return sizes;
}

std::string Engine::describe(const std::shared_ptr<Operation>& operation) {
  auto lock = locked();
  return operation->describe() + operation->describe_awaited();
}

// The engine's records for observers: the timeline, metrics, the flight record, and warnings about long waits.

namespace {

constexpr auto kNoteInterval = std::chrono::seconds(1);

} // namespace

void Engine::record_to(std::unique_ptr<FlightRecord> record) {
  const auto lock = locked();
  if (!record_) {
    record_ = std::move(record);
  }
}

std::unordered_map<int, PeerTraffic> Engine::traffic(const std::shared_ptr<Group>& group) {
  const auto lock = locked();
  return group->traffic;
}

void Engine::note_wait(Operation& operation, Deadline now) {
  const auto begun = operation.deadline() - operation.timeout();
  if (operation.computing || now < begun + kNoteInterval || now < operation.next_note) {
    return;
  }
  operation.next_note = now + kNoteInterval;
  if (record_) {
    note_awaited(operation);
  }
  const auto patience = std::chrono::seconds(settings().warn_after);
  if (patience.count() > 0 && !operation.warned && now >= begun + patience) {
    operation.warned = true;
    LOG(WARNING) << "fog: " << operation.describe() << " has waited " << patience.count() << " s" << operation.describe_awaited();
  }
}

void Engine::note_awaited(const Operation& operation) {
  const auto& members = operation.group()->members;
  const auto& own_host = members[operation.group()->rank].host_id;
  const auto awaited = operation.awaited();
  std::vector<FlightRecord::Awaited> first;
  for (const int rank : awaited) {
    if (first.size() < FlightRecord::kNamed) {
      first.push_back({rank, members[rank].host_id == own_host ? members[rank].pid : 0});
    }
  }
  record_->wait(operation.flight, first, awaited.size());
}

void Engine::run_profiled(Operation& operation, bool computes) {
  // torch's profiler observes the threads that it was started on, and a thread that waits for an operation also drives
  // the engine. The profiler's callbacks are not passed on to other threads: at its end the profiler frees its events,
  // even while an operation runs.
  at::RecordFunction range(at::RecordScope::USER_SCOPE);
  if (range.isActive()) {
    range.before(c10::str(computes ? "fog:combined " : "fog:moved ", name_of(operation.signature().kind)));
  }
  operation.run();
}

void Engine::end_times(Operation& operation, bool failed) {
  const auto& group = operation.group();
  try {
    const auto [peer, time] = operation.times->last();
    if (peer >= 0) {
      group->traffic[peer].waited_last += time;
    }
    operation.times->end(operation, failed);
  } catch (const std::bad_alloc&) { // the observations lack this operation
  }
}

} // namespace fog
