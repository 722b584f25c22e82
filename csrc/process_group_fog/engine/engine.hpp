// The progress engine: drives the operations of groups over a transport. A process has one for all its groups, see process_engine.hpp;
// tests make hundreds over the in-process transport.
//
// Progress is cooperative. Whoever waits for a Work drives every operation in flight; a background thread does it only
// while operations are in flight and nobody waits. Threads with nothing to do sleep until a message of this host rings
// their bell; where something may come over MPI, they look now and then. One lock guards MPI and all state; completions
// (which may run Python callbacks) and arithmetic happen outside of it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <c10/util/SmallVector.h>

#include "engine/completion_pool.hpp"
#include "engine/flight_record.hpp"
#include "engine/work.hpp"
#include "engine/group.hpp"
#include "transport/transport.hpp"
#include "engine/operation.hpp"
#include "engine/service.hpp"
#include "job/mpi_watchdog.hpp"

namespace fog {

class Engine final : public Driver, public MessageHandler {
 public:
  Engine();
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // How its messages go. Given once, before the first group of several ranks.
  void use(std::unique_ptr<Transport> transport);
  // Starts the threads that drive and complete, unless they run; an engine without them is driven by those that wait, and by drive_once(). No
  // call of MPI is to last longer than `patience`. Throws DistBackendError if the system refuses them.
  void start_threads(std::chrono::milliseconds patience);
  // A group of processes that have met. `addresses`: where members of this host are reached; none of other hosts'.
  std::shared_ptr<Group> add_group(
      uint64_t id, std::string name, int rank, std::vector<Member> members, const std::vector<std::string>& addresses);

  // Starts an operation. An empty name gives it the next place in the group's program order. Throws without starting
  // anything: ValueError if the name is in flight, DistBackendError if the group has failed or is closed. `waits`: the caller
  // goes straight on to drive_until(), so the background need not be woken for what comes before.
  void submit(
      const std::shared_ptr<Group>& group,
      const std::shared_ptr<Operation>& operation,
      std::chrono::milliseconds timeout,
      const std::string& name = "",
      bool waits = false);

  bool drive_until(const std::atomic<bool>& done, std::chrono::steady_clock::time_point deadline) override;
  void drive_once(const std::atomic<bool>& done) override;
  // Whether this process is a fork of the one that the engine is of: then it must not touch what others share.
  bool forked() const {
    return forked_;
  }
  void check_not_forked() const;
  using Refused = CompletionPool::Refused;
  void run_callbacks(std::function<void()> callbacks, Refused refused = Refused::kQueue) override;

  // Fails everything in flight in the group and all later operations, here and on every rank.
  void abort(const std::shared_ptr<Group>& group, const std::string& reason);
  // The group is not used any more on this rank; those that still wait for this rank are told.
  void close(const std::shared_ptr<Group>& group);
  Failure failure(const std::shared_ptr<Group>& group);
  uint64_t sequence(const std::shared_ptr<Group>& group);
  // What the group's operations have sent from here: messages, and bytes of data in them.
  std::pair<uint64_t, uint64_t> sent(const std::shared_ptr<Group>& group);
  std::string describe(const std::shared_ptr<Operation>& operation);

  // Somebody observes from now on (a timeline, metrics), or does not any more: operations that begin while anybody does note when they do what.
  void observe(bool on) {
    observers_ += on ? 1 : -1;
  }
  bool observed() const {
    return observers_.load(std::memory_order_relaxed) > 0;
  }
  // By group rank: what was exchanged while somebody observed.
  std::unordered_map<int, PeerTraffic> traffic(const std::shared_ptr<Group>& group);
  // Where operations are recorded from now on. Given once, before the first group.
  void record_to(std::unique_ptr<FlightRecord> record);

  // Sizes of what grows with what a program does, for tests.
  struct Bookkeeping {
    size_t names; // of operations, in all groups
    size_t closed_groups; // that others have not closed
    size_t early_bytes;
  };
  Bookkeeping bookkeeping();

  // --- for a service ---
  // Who answers messages that are no operation's. Given once, before the first group.
  void serve(std::unique_ptr<Service> service) {
    service_ = std::move(service);
  }
  Service& service() const {
    return *service_;
  }
  // Calls act() with the lock.
  template <typename Act>
  auto with_lock(Act&& act) {
    const Lock lock(mutex_);
    return act();
  }
  // Calls act(), which starts something that is to end by `deadline`, and makes progress. What act() throws comes through.
  void begin(Deadline deadline, const std::function<void()>& act);
  // Calls act(), which sends something that nothing follows from here.
  void tell(const std::function<void()>& act);
  // Messages may come for the service from now on: the background looks for them.
  void listen();
  // With the lock: throws DistBackendError if the group takes no more work.
  void check_open(const Group& group) const;
  // With the lock: how messages go.
  Transport& transport() const {
    return *transport_;
  }
  // Whether the peer shares memory with this process.
  bool shares_memory(const std::shared_ptr<Group>& group, int peer);
  // How large data goes to the peer, see Transport::way_to(); "" if there is nobody but this process.
  std::string way_to(const std::shared_ptr<Group>& group, int peer);
  // Whether a process has ended, or said that it does.
  bool has_left(int peer_id);
  // Is called without the lock when that happens, in any thread.
  void set_ended_listener(void (*listener)(int peer_id)) {
    ended_listener_ = listener;
  }
  void wake_waiters() override;

  // Called every now and then by a thread that waits; may throw (Ctrl-C).
  void set_interrupt_check(std::function<void()> check) {
    interrupt_check_ = std::move(check);
  }
  // For waits of the program's threads that are not the engine's.
  void check_interrupt() {
    if (interrupt_check_ && !CompletionPool::is_current_thread()) {
      interrupt_check_();
    }
  }

  // Says goodbye to all peers and waits for theirs, but not long; from then on nothing goes. Whether all was well; nothing if there was nobody
  // to say it to, or it was said. For interpreter exit.
  std::optional<bool> shutdown();
  // For what else is to hold when a call of MPI does not return.
  Watchdog& watchdog() {
    return watchdog_;
  }
  // This process is the fork of one that has the engine. Where that had made no group yet, nothing is shared.
  void set_forked() {
    forked_ = used_.load();
  }
  // One round of progress, for who drives engines without threads; true if anything moved.
  bool progress();
  // Looks for processes that have ended.
  void look_for_ended_peers();

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Completion {
    std::shared_ptr<Operation> operation;
    std::exception_ptr error;
  };
  // What must be destroyed or called without the lock.
  struct Outbox {
    c10::SmallVector<Completion, 1> completions;
    std::vector<std::shared_ptr<TransferOwner>> released;
    c10::SmallVector<std::shared_ptr<Operation>, 4> retired;
    std::vector<std::shared_ptr<void>> of_service;
    std::vector<int> ended; // world ranks
  };

  void on_message(int source, const Header& header, const char* data) override;
  bool has_ended(int peer) override {
    return lost_.count(peer) > 0;
  }
  bool is_leaving(int peer) override {
    return departed_.count(peer) > 0;
  }
  void tell_closed(int source, const Header& header);
  void route(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data);
  // A disagreement fails the group.
  void hand_over(const std::shared_ptr<Operation>& operation, int source, const Header& header, const char* data);
  void on_point_to_point(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data);

  // How long the end of a group, or of the process, waits for others.
  static constexpr auto kLeaveTimeout = std::chrono::seconds(3);
  // The lock; a call of MPI that keeps it beyond the deadline is ended.
  Lock lock_by(Deadline deadline);
  // One round of progress with the lock held (it is released around arithmetic); true if anything moved. An exception in it,
  // no memory say, becomes the failure of what it concerns, or of everything in flight.
  bool drive(Lock& lock);
  bool make_progress(Lock& lock);
  bool take_messages();
  void step_ready(Lock& lock);
  bool step_service(Lock& lock);
  void check_peers(Lock& lock);
  void on_process_end(Lock& lock, int peer, bool silent, bool departed);
  void check_deadlines();
  // The Work follows in unlock_and_deliver(), or, if a thread is in run(), as soon as that has left the operation's memory.
  void complete(const std::shared_ptr<Operation>& operation, std::exception_ptr error);
  // Lets an operation copy or compute, as a range of torch's profiler if this thread is profiled.
  static void run_profiled(Operation& operation, bool computes);
  // Adds the observations of an operation that has ended to the traffic and the timeline.
  static void end_times(Operation& operation, bool failed);
  // The first failure decides; the group is told of it where `tell` is set, or where this rank is to pass it on. Lacking memory for that, everything fails
  // as soon as there is some.
  void fail(const std::shared_ptr<Group>& group, c10d::ErrorType type, const std::string& reason, bool tell = true);
  void fail_now(const std::shared_ptr<Group>& group, c10d::ErrorType type, const std::string& reason, bool tell);
  // Its group, with this error of its own.
  void fail(const std::shared_ptr<Operation>& operation, const std::exception& error);
  // All groups and windows. Tried again in the next round if there is no memory for it.
  void fail_everything(const std::string& reason, bool tell);
  // Fails the group if an operation waits for this rank; `announced` as in Operation::awaited().
  void fail_awaiting(const std::shared_ptr<Group>& group, int peer, const std::string& reason, bool announced);
  // At the operation's time-out: asks whom it waits for, and whom these wait for. False when it knows as much as it will.
  bool inquire(const std::shared_ptr<Operation>& operation, Deadline now);
  void ask(const Operation& operation, const std::vector<int>& ranks);
  // Has the end of those that an operation waits for noticed, of those too that nothing goes to.
  void watch_awaited(Operation& operation, Deadline now);
  // The same of an operation that has waited for a second, once: a rank that has called something else says so.
  void ask_early(Operation& operation, Deadline now);
  // For those that look at this process from outside; a long wait is warned of, once.
  void note_wait(Operation& operation, Deadline now);
  void note_awaited(const Operation& operation);
  void on_ask(const std::shared_ptr<Group>& group, int source, const Header& header);
  void on_answer(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data);
  // To a member of the group, if it can be reached.
  void send_quietly(const std::shared_ptr<Group>& group, int rank, Header header, const std::string& text);
  // The same in all groups: the process has ended.
  void lose(int peer_id, const std::string& how, bool announced);
  // Nothing more comes from there for a group that is closed here.
  void forget_closed(uint64_t group, int peer_id);
  // Asks processes whose early messages take too much memory to hold their data back.
  void tell_early_load();
  // Tells this rank's part of the group why it failed, but nobody twice.
  void spread_news(Group& group);
  void tell_all_closed(const Group& group);
  // Whether nothing needs to be said to that member any more.
  bool is_away(const Group& group, int rank) const;
  // Whether a process is told when this rank closes a group: those of other hosts only if there are connections already.
  bool hears_of_end(int peer_id) const;
  // Takes what has to happen without the lock and does it after unlocking.
  void unlock_and_deliver(Lock& lock);

  class WaiterGuard;
  Doorbell& bell() {
    auto* transport = linked_.load();
    return transport != nullptr ? transport->bell() : early_bell_;
  }
  void watch_in_background();
  void sleep_until_message(std::chrono::nanoseconds limit);
  // For a thread that waits until `done` is set: sleeps until that, or news, may have come, but not longer than `limit`.
  void sleep_until_news(const std::atomic<bool>& done, std::chrono::nanoseconds limit);
  void background();
  // Whether somebody has to drive MPI for what this process has started.
  bool busy() const;

  std::mutex mutex_;
  Watchdog watchdog_;
  std::unique_ptr<Transport> transport_;
  // The same for threads without the lock; null before there is one.
  std::atomic<Transport*> linked_{nullptr};
  Doorbell early_bell_ = {};
  std::unique_ptr<Service> service_;
  std::unordered_map<uint64_t, std::shared_ptr<Group>> groups_;
  EarlyLoad early_load_;
  std::unordered_map<uint64_t, std::vector<EarlyMessage>> early_; // for groups not made here yet; source is a world rank
  // Groups that are closed here, with those ranks of the world that have not said the same: something may come from them yet.
  std::unordered_map<uint64_t, std::unordered_set<int>> closed_groups_;
  // Those closed last: ranks that this one never spoke with were not told.
  std::unordered_set<uint64_t> closed_lately_;
  std::deque<uint64_t> closed_in_order_;
  std::deque<std::shared_ptr<Operation>> ready_;
  std::vector<std::function<void()>> afterwards_; // news of failures and ends on other ranks, to act on after this round
  std::vector<std::pair<std::shared_ptr<Operation>, std::string>> failed_; // in a step, and why
  Outbox outbox_;
  std::unordered_set<int> departed_; // world ranks that said goodbye
  std::unordered_set<int> released_by_; // world ranks that took this one's goodbye or have ended
  std::unordered_set<int> lost_; // world ranks that ended without
  std::unordered_set<int> silent_; // those of them whose host merely does not answer: they may still write to this process's memory
  std::chrono::steady_clock::time_point last_news_; // of anything
  std::chrono::steady_clock::time_point next_check_;
  int checks_left_out_ = 0; // since the last one
  std::atomic<size_t> in_flight_{0};
  std::atomic<int> waiting_{0}; // threads in drive_until()
  std::atomic<int> sleepers_{0}; // those of them that sleep, or are about to
  std::atomic<bool> must_poll_{false};
  std::atomic<Transport::Flow> flow_{Transport::Flow::kNone};
  std::atomic<bool> service_busy_{false};
  std::atomic<bool> stopping_{false};
  bool unhealthy_ = false;
  std::atomic<bool> failing_{false}; // everything is to fail, which has not been possible yet
  bool oversubscribed_ = false;
  std::atomic<int> observers_{0};
  std::unique_ptr<FlightRecord> record_;
  std::atomic<bool> used_{false}; // there was a group, or one in the making
  std::atomic<bool> forked_{false};
  std::thread thread_;
  CompletionPool completions_;
  std::function<void()> interrupt_check_;
  std::atomic<void (*)(int peer_id)> ended_listener_{[](int) {}};
  // Processes of other hosts that have ended: what they sent before may come yet, until then.
  struct DrainingPeer {
    int peer;
    bool silent;
    bool departed;
    std::chrono::steady_clock::time_point end;
  };
  std::vector<DrainingPeer> draining_;
};

} // namespace fog
