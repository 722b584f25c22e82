// The internals of a Window: its calls in flight, its neighbors, and the legs by which operations reach them. Only the
// window's own sources include this file.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/timeline.hpp"
#include "engine/engine.hpp"
#include "engine/work.hpp"
#include "windows/mailbox.hpp"
#include "windows/window.hpp"
#include "windows/window_service.hpp"

namespace fog {

// The name of an operation in error messages.
const char* name_of(WindowOp op);

// A window's operation in the timeline.
class WindowSlice {
 public:
  // Begins now, if there is a timeline.
  WindowSlice();

  // Adds an exchange of `bytes` with another rank.
  void add(int rank, size_t bytes) {
    if (lane_) {
      ranks_.push_back(rank);
      bytes_ += bytes;
    }
  }
  // Ends the slice; `name` must live forever.
  void end(const char* name, const std::string& group, const std::string& window, bool failed) noexcept;

 private:
  class Entry;

  Timeline::Clock::time_point begun_;
  Timeline::Lane lane_;
  std::vector<int> ranks_;
  size_t bytes_ = 0;
};

// A call is complete once all its parts are.
class Window::Call {
 public:
  Call(
      std::shared_ptr<Window> window,
      WindowOp its_op,
      at::Tensor its_tensor,
      Deadline its_deadline,
      c10::intrusive_ptr<WorkFog> its_work)
      : op(its_op), tensor(std::move(its_tensor)), deadline(its_deadline), work(std::move(its_work)), window_(std::move(window)) {}
  // Records the exchange of `bytes` with each of these ranks.
  void observe(const Peers& peers, size_t bytes);
  void expect() {
    pending_.fetch_add(1);
  }
  // Sets a function that is called once all parts have succeeded, before the call is complete. Must be set before the
  // first part. `waits`: the function may wait for a device, so it must not be called in a thread of the engine.
  void then(std::function<void()> what, bool waits) {
    then_ = std::move(what);
    waits_ = waits;
  }
  void finish(const std::exception_ptr& error);
  // finish() for the threads of the engine.
  static void finish_from_engine(const std::shared_ptr<Call>& call, const std::exception_ptr& error);

  const WindowOp op;
  const at::Tensor tensor; // the program's tensor; undefined if nothing is sent
  const Deadline deadline;
  const c10::intrusive_ptr<WorkFog> work;

 private:
  const std::shared_ptr<Window> window_;
  WindowSlice slice_;
  std::atomic<size_t> pending_{1};
  std::mutex mutex_;
  std::exception_ptr error_;
  std::function<void()> then_;
  bool waits_ = false;
};

// The part of a call that concerns one neighbor.
struct Window::Part {
  WindowOp op;
  double weight;
  std::optional<double> p;
  size_t offset; // in bytes, for writes into the tensor
  bool mutex;
  at::Tensor data;
  Milliseconds timeout;
  Deadline deadline;
  std::shared_ptr<Call> call;
  bool waits; // the caller waits for the call next
  // for an accumulate by message: the number of puts that this rank has made to the neighbor's mailbox before
  uint64_t puts = 0;
};

// A leg is the path to one neighbor. It has few primitives, so that another transport only needs another class beside
// these. Writing into a slot and publishing the value are one primitive, because either side may publish, depending on
// the transport. Operations are done in the order of the calls.
class Window::Leg {
 public:
  Leg(Window& window, Neighbor& neighbor) : window_(window), neighbor_(neighbor) {}
  virtual ~Leg() = default;
  Leg(const Leg&) = delete;
  Leg& operator=(const Leg&) = delete;

  // The word for transport_to().
  virtual const char* name() const = 0;
  // Returns the neighbor's tensor if this process has mapped it, otherwise null.
  virtual char* map() const = 0;
  // Does kPut or kAccumulate (write and publish), kGet (read), kWrite or kSignal, and finishes the part unless it
  // throws.
  virtual void start(Part part) = 0;
  // Returns the functions to get and release the pair's mutex that the neighbor owns.
  virtual RankMutex::Other mutex() = 0;
  // Ends this rank's use of the neighbor's window. Operations that were started before are done first.
  virtual void leave() = 0;
  // Called when the group is about to be closed and nothing may be sent in it afterwards: sends the last messages now,
  // even with operations in flight.
  virtual void on_closing() {}

 protected:
  Window& window_;
  Neighbor& neighbor_;
};

// Does operations in the caller's thread, so that they are complete on return. Operations that wait for a mutex, and
// those behind them in the queue, run in a thread of the completion pool.
class Window::DirectLeg : public Leg {
 public:
  using Leg::Leg;

  void start(Part part) final;

 protected:
  // Does the part, or passes it on to be finished later: then it returns false.
  virtual bool execute(Part& part) = 0;
  // Returns whether this rank has to hold the pair's mutex during execute().
  virtual bool needs_mutex(const Part& part) const {
    return part.mutex;
  }

 private:
  // Executes the part unless there is an `error` already, calls `between`, then finishes the part.
  void perform(Part& part, std::exception_ptr error, const std::function<void()>& between);
  void run_queue();
  // Runs the first part of the queue, or ends it with `error` if it belongs to the call `failed`. `locked`: this thread
  // has the mutex. Returns false if there is nothing left to run.
  bool run_first(bool locked, const Call* failed, std::exception_ptr error);

  std::mutex queue_mutex_;
  std::deque<Part> queue_;
  bool running_ = false; // a thread runs the queue
  std::mutex turn_; // held by the thread that runs the first part of the queue, to keep the order
};

// For neighbors whose memory is mapped.
class Window::MappedLeg final : public DirectLeg {
 public:
  // Returns null unless the neighbor's memory can be mapped.
  static std::unique_ptr<Leg> create(Window& window, Neighbor& neighbor, const WindowDescription& there);

  static constexpr const char* kName = "shared memory";
  const char* name() const override {
    return kName;
  }
  char* map() const override {
    return view_->tensor();
  }
  RankMutex::Other mutex() override;
  void leave() override;

 private:
  MappedLeg(Window& window, Neighbor& neighbor, std::unique_ptr<WindowView> view, size_t control, size_t slot)
      : DirectLeg(window, neighbor), view_(std::move(view)), control_(view_->control(control)), place_(control), slot_(slot) {}

  bool execute(Part& part) override;
  // Copies the neighbor's tensor into this rank's slot for it.
  void fetch(double weight, Deadline deadline);

  const std::unique_ptr<WindowView> view_;
  PeerControl& control_; // this rank's control in the neighbor's memory
  const size_t place_;
  const size_t slot_;
};

// Sends operations as messages, which the neighbor's WindowService serves.
class Window::MessageLeg final : public Leg {
 public:
  using Leg::Leg;

  static constexpr const char* kName = "messages";
  const char* name() const override {
    return kName;
  }
  char* map() const override {
    return nullptr;
  }
  void start(Part part) override {
    start(std::move(part), nullptr);
  }
  // The same, and calls `ended`, if set, just before it finishes the part.
  void start(Part part, std::function<void()> ended);
  RankMutex::Other mutex() override;
  void leave() override;

 private:
  std::shared_ptr<WindowRequest> request(WindowOp op, std::string what) const;
  void tell(WindowOp op);
  bool acquire(Deadline deadline);
};

struct Window::Neighbor {
  int rank = 0;
  bool in = false;
  bool out = false;
  size_t control = 0; // of the neighbor, in this rank's memory
  size_t slot = 0; // if it is an in-neighbor
  bool writes = true; // it may write to this rank's memory itself
  bool tells = false; // it writes by RMA, and tells this rank when it stops
  std::unique_ptr<MailboxReader> mailbox; // for its puts into this rank's pool; null if it cannot put there
  std::unique_ptr<Leg> leg; // null before connect()
  std::unique_ptr<Leg> raw_leg; // for write() and signal(), if not the same
  std::unique_ptr<RankMutex> mutex_here; // [this rank][neighbor]
  std::unique_ptr<RankMutex> mutex_there; // [neighbor][this rank]
  std::mutex writing; // held by the writer of this rank's slot there or, without a mailbox, of its slot here
  std::atomic<bool> gone{false};
  std::atomic<bool> ended{false}; // its process has ended
  std::atomic<bool> lost{false}; // nobody waits for it any more, though its process may still run
  std::string how; // why it has gone; guarded by state_
};

// Keeps the memory of this rank and of its neighbors while it lives.
class Window::Use {
 public:
  Use(Window& window, const char* op, For whom) : window_(window) {
    window_.begin_call(op, whom);
  }
  ~Use() {
    window_.end_call();
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  Window& window_;
};

} // namespace fog
