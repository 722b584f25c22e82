// The progress engine, which drives the operations of groups over a transport. A process has one engine for all its
// groups, see process_engine.hpp; tests create hundreds over the in-process transport.
//
// Progress is cooperative. A thread that waits for a Work drives all operations in flight; a background thread drives
// them only while operations are in flight and no thread waits. Threads without work sleep until a message of this host
// rings their bell; if data may come by MPI RMA, they poll from time to time. One lock guards MPI and all state.
// Completions (which may run Python callbacks) and arithmetic happen outside of it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <c10/util/SmallVector.h>

#include "core/peer.hpp"
#include "engine/call_gaps.hpp"
#include "engine/completion_pool.hpp"
#include "engine/flight_record.hpp"
#include "engine/liveness.hpp"
#include "engine/membership_mail.hpp"
#include "engine/work.hpp"
#include "engine/group.hpp"
#include "transport/transport.hpp"
#include "engine/operation.hpp"
#include "engine/service.hpp"
#include "job/mpi_watchdog.hpp"

namespace fog {

struct PeerInformation;

class Engine final : public MessageHandler {
 public:
  Engine();
  ~Engine() override;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Sets the transport. Called once, before the first group of several ranks.
  void use(std::unique_ptr<Transport> transport);
  // Starts the threads that drive and complete operations, unless they run already. Without them, only waiting threads
  // and drive_once() drive the engine. `patience`: the longest time that a call of MPI may take. Throws
  // DistBackendError if the system refuses the threads.
  void start_threads(std::chrono::milliseconds patience);
  // Adds a group of processes that have met. `addresses`: where to reach the members of this host; those of other hosts
  // are not used. None: this process knows them already.
  std::shared_ptr<Group> add_group(
      uint64_t id, std::string name, int rank, std::vector<Member> members, const std::vector<std::string>& addresses);
  // Adds a group of some members of another one, which may have failed. Nothing is sent, and no rank waits: each of
  // `ranks` makes the same call, with the same number, which is used once in that group. This rank is one of them. Ranks
  // beyond those of `whole`, which is the world then, have joined later.
  std::shared_ptr<Group> add_part(const Group& whole, uint64_t number, std::string name, const std::vector<int>& ranks);

  // --- processes that join, see joining.hpp ---
  // The number of calls for attention by processes that want to join. Takes no lock.
  uint32_t announced() const {
    return pulse_.load(std::memory_order_relaxed)->announced.load(std::memory_order_acquire);
  }
  // That process takes the place of a peer that is lost, or that this process has not known yet. Throws DistBackendError
  // if the process before may still write to this one's memory, or is not lost. `is_here`: it is on this host.
  void admit(int peer_id, const PeerInformation& peer, bool is_here);
  // The same as declare_lost(), for a process that joins.
  void give_up(int peer_id, Peer::State state, const std::string& how);
  // Returns whether the peer has admitted this process too; throws Unreachable if it is lost.
  bool is_connected_with(int peer_id);
  // Makes the group refuse all operations on this rank, with this reason. The other ranks are not told.
  void refuse_work(const std::shared_ptr<Group>& group, const std::string& reason);

  // --- messages about the job's members, see MembershipMail; ranks are those of the world ---
  // Sends a message of at most OfMembership::kMostBytes, and does not wait. Returns false if the process cannot be reached,
  // is lost or has left, or does not read what was sent before.
  bool send_membership(int peer_id, uint64_t epoch, std::string_view text);
  // Returns the messages that have come, in the order of each sender.
  std::vector<MembershipMail::Message> take_membership();
  // Returns true as soon as there are any, and false at the deadline or when the process ends. The wait is no sign of life of
  // the program, except in its main thread, where it may throw an exception of the interrupt check.
  bool wait_membership(Deadline deadline);
  // From now on this engine sends `text` to each rank whose message tells an epoch up to `epoch`.
  void answer_membership(uint64_t epoch, std::string text);

  // Starts an operation. An empty name gives it the next place in the group's program order. Throws without starting
  // anything: ValueError if the name is in flight, DistBackendError if the group has failed or is closed. `waits`: the
  // caller calls drive_until() next, so the background thread is not woken.
  void submit(
      const std::shared_ptr<Group>& group,
      const std::shared_ptr<Operation>& operation,
      std::chrono::milliseconds timeout,
      const std::string& name = "",
      bool waits = false);

  // Makes progress until `done` is set or `deadline` has passed, without Python's lock; returns whether `done` is set.
  // May throw an exception of the program's interrupt check (Ctrl-C).
  bool drive_until(const std::atomic<bool>& done, std::chrono::steady_clock::time_point deadline);
  // Makes progress once, if there is anything to do and no other thread does it. A thread that only polls `done` sleeps
  // for short times until `done` may be set. Long steps are done without Python's lock.
  void drive_once(const std::atomic<bool>& done);
  // Returns whether this process is a fork of the engine's process. If so, it must not touch shared resources.
  bool forked() const {
    return forked_;
  }
  void check_not_forked() const;
  using Refused = CompletionPool::Refused;
  // Runs callbacks, which may block, in a thread that no other thread waits for.
  void run_callbacks(std::function<void()> callbacks, Refused refused = Refused::kQueue);

  // Fails all operations in flight and all later operations of the group, on every rank.
  void abort(const std::shared_ptr<Group>& group, const std::string& reason);
  // Ends the use of the group on this rank, and tells the ranks that may wait for this rank.
  void close(const std::shared_ptr<Group>& group);
  Failure failure(const std::shared_ptr<Group>& group);
  // Makes the transport notice the end of these ranks, also if nothing is sent to them.
  void watch(const Group& group, const std::vector<int>& ranks);
  // A thread of the pool calls `function` once, when a member of the group is lost; its argument says which. It replaces an
  // earlier function. The end of members is noticed from now on, even if nothing is sent to them. Returns which one is lost
  // already; empty if none is.
  std::string call_when_lost(const std::shared_ptr<Group>& group, std::function<void(const std::string& which)> function);
  uint64_t sequence(const std::shared_ptr<Group>& group);
  // The messages, and the bytes of data in them, that the group's operations have sent from this rank.
  std::pair<uint64_t, uint64_t> sent(const std::shared_ptr<Group>& group);
  std::string describe(const std::shared_ptr<Operation>& operation);

  // Registers or removes an observer (a timeline, metrics). Operations record their times if they begin while there is
  // an observer.
  void observe(bool on) {
    observers_ += on ? 1 : -1;
  }
  bool observed() const {
    return observers_.load(std::memory_order_relaxed) > 0;
  }
  // The traffic with each group rank while there was an observer.
  std::unordered_map<int, PeerTraffic> traffic(const std::shared_ptr<Group>& group);
  // Sets where operations are recorded. Called once, before the first group.
  void record_to(std::unique_ptr<FlightRecord> record);

  // --- signs of life, see Liveness ---
  // The program calls: others see that it goes on. Also notices if others count this process as lost.
  void note_call();
  // The program makes no calls for a while, which is no hang; ends with a matching call with false.
  void suspend_judgement(bool on);
  // After how long without a sign of life a peer may be declared lost at the earliest; 0: never.
  void set_lost_after(std::chrono::nanoseconds lost_after);
  std::chrono::nanoseconds lost_after();
  // The ranks of the group that are lost: their processes have ended without a goodbye, or they were declared lost.
  std::vector<int> lost_ranks(const Group& group);
  // Those of them whose processes may still run: they were declared lost, or nothing comes from their hosts.
  std::vector<int> silent_ranks(const Group& group);
  // The ranks that have closed the group, or whose processes have ended in good order.
  std::vector<int> left_ranks(const Group& group);
  // The ranks that may be declared lost soon, or would be if that was allowed.
  std::vector<int> suspect_ranks(const Group& group);

  // Sizes of the containers that could grow while a program runs, for tests.
  struct Bookkeeping {
    size_t names; // of operations, in all groups
    size_t closed_groups; // groups that other ranks have not closed yet
    size_t early_bytes;
  };
  Bookkeeping bookkeeping();

  // --- for a service ---
  // Sets the service that handles the messages which do not belong to operations. Called once, before the first group.
  void serve(std::unique_ptr<Service> service) {
    service_ = std::move(service);
  }
  Service& service() const {
    return *service_;
  }
  // Calls act() with the lock held.
  template <typename Act>
  auto with_lock(Act&& act) {
    const auto lock = locked();
    return act();
  }
  // Calls act(), which starts an activity that should end by `deadline`, and makes progress. Passes on exceptions of
  // act(). `waits`: as in submit().
  void begin(Deadline deadline, const std::function<void()>& act, bool waits);
  // Calls act(), which sends a message that needs no further progress on this rank.
  void tell(const std::function<void()>& act);
  // Makes the background thread poll for messages to the service, which may arrive at any time from now on.
  void listen();
  // Requires the lock. Throws DistBackendError if the group accepts no more work.
  void check_open(const Group& group) const;
  // Requires the lock.
  Transport& transport() const {
    return *transport_;
  }
  // Returns whether the peer shares memory with this process.
  bool shares_memory(const std::shared_ptr<Group>& group, int peer);
  // How large data travels to the peer, see Transport::way_to(); "" without a transport.
  std::string way_to(const std::shared_ptr<Group>& group, int peer);
  // What is known about a process.
  Peer peer(int peer_id);
  // Sets a function that is called when a process ends, without the lock and in any thread.
  void set_ended_listener(void (*listener)(int peer_id)) {
    ended_listener_ = listener;
  }
  // Wakes the threads in drive_until(): their operations may be done.
  void wake_waiters();

  // Sets a function that the program's main thread calls from time to time while it waits. It may throw (Ctrl-C), and may
  // have to wait for Python's lock, so a thread that calls it does not count as one that drives.
  void set_interrupt_check(std::function<void()> check) {
    interrupt_check_ = std::move(check);
  }
  // For waits of the program's threads outside of the engine.
  void check_interrupt() {
    if (CompletionPool::is_current_thread()) {
      return;
    }
    note_call();
    if (is_main_thread() && interrupt_check_) {
      interrupt_check_();
    }
  }

  // Says goodbye to all peers and waits a short time for their answers; afterwards no messages are sent or received.
  // Returns whether no failure occurred, or nullopt if there were no peers or shutdown() was called before. For
  // interpreter exit.
  std::optional<bool> shutdown();
  // Others use the watchdog to limit the time of their own calls of MPI.
  Watchdog& watchdog() {
    return watchdog_;
  }
  // Call in a fork of the engine's process. If no group had been created, nothing is shared and the engine stays
  // usable.
  void set_forked() {
    forked_ = used_.load();
  }
  // For tests: how long a thread sleeps that waits for an operation and is not woken.
  void set_longest_sleep(std::chrono::milliseconds longest) {
    longest_sleep_ = longest;
  }
  // Makes one round of progress, for callers that drive engines without threads; returns whether there was any.
  bool progress();
  // Checks for processes that have ended.
  void look_for_ended_peers();

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Completion {
    std::shared_ptr<Operation> operation;
    std::exception_ptr error;
  };
  // Objects that must be destroyed or called without the lock.
  struct Outbox {
    c10::SmallVector<Completion, 1> completions;
    std::vector<std::shared_ptr<TransferOwner>> released;
    c10::SmallVector<std::shared_ptr<Operation>, 4> retired;
    std::vector<std::shared_ptr<void>> of_service;
    std::vector<std::function<void()>> calls; // of the service
    std::vector<int> ended; // world ranks
    bool empty() const {
      return completions.empty() && released.empty() && retired.empty() && of_service.empty() && calls.empty();
    }
  };
  class Remains;

  void on_message(int source, const Header& header, const char* data) override;
  const Peers& peers() const override {
    return peers_;
  }
  void tell_closed(int source, const Header& header);
  void route(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data);
  // Passes a message to its operation. Fails the group if the operation rejects it.
  void hand_over(const std::shared_ptr<Operation>& operation, int source, const Header& header, const char* data);
  void on_point_to_point(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data);

  // Takes the lock for a call of the program. Throws RuntimeError in a forked child, where a thread may hold it that is
  // not there, and descriptors may be other files by now.
  Lock locked();
  // How long the end of a group, or of the process, waits for other ranks.
  static constexpr auto kLeaveTimeout = std::chrono::seconds(3);
  // The same; the watchdog ends a call of MPI that keeps the lock beyond the deadline.
  Lock lock_by(Deadline deadline);
  // Makes one round of progress and returns whether there was any. Requires the lock, and releases it during
  // arithmetic. An exception in the round, for example lack of memory, fails the operation or group that it concerns,
  // or everything in flight.
  bool drive(Lock& lock);
  bool make_progress(Lock& lock);
  bool take_messages();
  void step_ready(Lock& lock);
  bool step_service(Lock& lock);
  void check_peers(Lock& lock);
  void on_process_end(Lock& lock, const Transport::Ended& ended);
  void check_deadlines();
  // Declares the watched peers lost that show no sign of life for too long.
  void judge_peers(Deadline now);
  // Gives a peer that was alive the state kSilent or kLost.
  void declare_lost(int peer, Peer::State state, const std::string& how);
  // The process of a peer that was declared lost has ended.
  void on_end_of_lost(int peer);
  // Leaves the groups of peers that count this process as lost.
  void look_for_expulsions();
  void watch_program(const Operation& operation, int peer_id, Deadline now);
  // The operation fails, perhaps by the news of another rank: this rank goes on to judge those that it has waited for.
  void keep_watching(const Operation& operation);
  std::vector<int> ranks_that(const Group& group, const std::function<bool(int rank)>& holds);
  // Ends the operation. Its Work completes in unlock_and_deliver(), or, while a thread is in run(), as soon as that
  // thread no longer uses the operation's memory.
  void complete(const std::shared_ptr<Operation>& operation, std::exception_ptr error);
  // Calls the operation's run(), as a range of torch's profiler if this thread is profiled.
  static void run_profiled(Operation& operation, bool computes);
  // Adds the recorded times of an operation that has ended to the traffic and the timeline.
  static void end_times(Operation& operation, bool failed);
  // Fails the group; only the first failure counts. Tells the other ranks if `tell` is set or if this rank has to pass
  // the news on. If there is no memory for that, everything fails as soon as there is memory again.
  void fail(const std::shared_ptr<Group>& group, c10d::ErrorType type, const std::string& reason, bool tell = true);
  void fail_now(const std::shared_ptr<Group>& group, c10d::ErrorType type, const std::string& reason, bool tell);
  // Fails the operation's group with this error of the operation.
  void fail(const std::shared_ptr<Operation>& operation, const std::exception& error);
  // Fails all groups and windows. The next round tries again if there is no memory for it.
  void fail_everything(const std::string& reason, bool tell);
  void tell_of_loss(Group& group, int rank, const std::string& how);
  // Fails the group if an operation waits for `peer`; `announced` as in Operation::awaited().
  void fail_awaiting(const std::shared_ptr<Group>& group, int peer, const std::string& reason, bool announced);
  // Called when the operation's timeout is over: asks the ranks that it waits for, and the ranks that these wait for,
  // about their state. Returns false once the inquiry is complete.
  bool inquire(const std::shared_ptr<Operation>& operation, Deadline now);
  void ask(const Operation& operation, const std::vector<int>& ranks);
  // Makes the transport detect the end of the ranks that an operation waits for, also if nothing is sent to them.
  void watch_awaited(Operation& operation, Deadline now);
  // Asks the ranks that an operation has awaited for a second, once: a rank that has called another operation reports
  // the disagreement.
  void ask_early(Operation& operation, Deadline now);
  // Records a wait in the flight record, and warns once about a long wait.
  void note_wait(Operation& operation, Deadline now);
  void note_awaited(const Operation& operation);
  void on_ask(const std::shared_ptr<Group>& group, int source, const Header& header);
  void on_answer(const std::shared_ptr<Group>& group, int source, const Header& header, const char* data);
  void on_membership(int source, const Header& header, const char* data);
  bool post_membership(int peer_id, uint64_t epoch, bool is_answer, std::string_view text);
  // Sends a message to a process if it can be reached. If not, whoever waits for it learns that by other means.
  void send_quietly(int peer_id, const Header& header, const std::string& text = "");
  // Handles the end of a process in all groups.
  void lose(int peer_id, const std::string& how, bool announced);
  // Notes that the process sends no more messages for a group that is closed here.
  void forget_closed(uint64_t group, int peer_id);
  // Asks processes whose early messages take too much memory to hold their data back, and tells them when they may send
  // again.
  void tell_early_load();
  // No operation takes the messages that came early for that group.
  void ignore_early(Group& group);
  // Tells this rank's share of the group why it failed, each member at most once.
  void spread_news(Group& group);
  void tell_all_closed(const Group& group);
  // Returns whether the member has left the group, or its process is not alive: it needs no more messages.
  bool is_away(const Group& group, int rank) const;
  // Returns whether a process is told when this rank closes a group. Processes of other hosts are told only if there is
  // a connection already.
  bool hears_of_end(int peer_id) const;
  // Unlocks, then does the work that must happen without the lock. Returns what is left of it, which the caller
  // destroys; a thread that drives for others must not, see Remains.
  Outbox unlock_and_deliver(Lock& lock);
  static bool is_main_thread();

  class WaiterGuard;
  Doorbell& bell() {
    auto* transport = linked_.load();
    return transport != nullptr ? transport->bell() : early_bell_;
  }
  void watch_in_background();
  // Sleeps in a thread that waits for `done`, until `done` may be set, news may have come, or `limit` is over.
  void sleep_until_news(const std::atomic<bool>& done, std::chrono::nanoseconds limit);
  void background();
  // Returns whether the work of this process needs a thread to drive it.
  bool busy() const;

  std::mutex mutex_;
  Watchdog watchdog_;
  std::unique_ptr<Transport> transport_;
  // The transport, for threads without the lock; null before use().
  std::atomic<Transport*> linked_{nullptr};
  Doorbell early_bell_ = {};
  Pulse early_pulse_ = {};
  std::atomic<Pulse*> pulse_{&early_pulse_}; // the transport's as soon as there is one
  CallGaps gaps_;
  Liveness liveness_;
  std::chrono::steady_clock::time_point next_judgement_{};
  std::atomic<uint32_t> lost_by_seen_{0};
  std::unique_ptr<Service> service_;
  std::unordered_map<uint64_t, std::shared_ptr<Group>> groups_;
  EarlyLoad early_load_;
  // messages of groups that do not exist here yet; `source` is a world rank
  std::unordered_map<uint64_t, std::vector<EarlyMessage>> early_;
  // Groups that are closed here, with the world ranks that have not closed them yet: messages may still come from these
  // ranks.
  std::unordered_map<uint64_t, std::unordered_set<int>> closed_groups_;
  // The groups that were closed last, to answer ranks that were not told because they had never communicated with this
  // one.
  std::unordered_set<uint64_t> closed_lately_;
  std::deque<uint64_t> closed_in_order_;
  std::deque<std::shared_ptr<Operation>> ready_;
  // reactions to news of failures and ends on other ranks, for the end of the round
  std::vector<std::function<void()>> afterwards_;
  std::vector<std::pair<std::shared_ptr<Operation>, std::string>> failed_; // operations that failed in a step, and why
  Outbox outbox_;
  Peers peers_;
  std::unordered_set<int> released_by_; // world ranks that have received this one's goodbye
  std::unordered_map<int, Member> admitted_; // processes, by world rank; without the number of their host
  std::chrono::steady_clock::time_point last_news_; // time of the last progress
  std::chrono::steady_clock::time_point next_check_;
  int checks_left_out_ = 0; // since the last check
  std::atomic<size_t> in_flight_{0};
  std::atomic<int> waiting_{0}; // threads in drive_until()
  // If the bell rings for all messages: only deadlines and other processes are checked between sleeps.
  std::atomic<std::chrono::milliseconds> longest_sleep_{std::chrono::milliseconds(20)};
  std::atomic<int> sleepers_{0}; // waiting threads that sleep or are about to
  std::atomic<bool> must_poll_{false};
  std::atomic<bool> data_moves_{false};
  std::atomic<bool> service_busy_{false};
  std::atomic<bool> service_listens_{false};
  std::atomic<bool> dozes_{false}; // the background thread looks again soon
  std::atomic<bool> stopping_{false};
  bool unhealthy_ = false;
  std::atomic<bool> failing_{false}; // everything is to fail, but there was no memory for it yet
  std::atomic<bool> oversubscribed_{false}; // there are more ranks on this host than cores
  std::atomic<int> observers_{0};
  std::unique_ptr<FlightRecord> record_;
  std::atomic<bool> used_{false}; // a group exists or is being created
  std::atomic<bool> forked_{false};
  std::thread thread_;
  CompletionPool completions_;
  std::function<void()> interrupt_check_;
  std::atomic<void (*)(int peer_id)> ended_listener_{[](int) {}};
  MembershipMail mail_; // empty without a group
  std::condition_variable mail_came_;
};

} // namespace fog
