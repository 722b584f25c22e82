// What a Window is made of: its calls in flight, its neighbors, and the legs on which operations reach these. For the window's own sources.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "engine/engine.hpp"
#include "engine/work.hpp"
#include "windows/mailbox.hpp"
#include "windows/window.hpp"
#include "windows/window_service.hpp"
#include "windows/window_slice.hpp"

namespace fog {

// The name of an operation in errors.
const char* name_of(WindowOp op);

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
  // It exchanges so many bytes with each of these ranks.
  void observe(const Peers& peers, size_t bytes);
  void expect() {
    pending_.fetch_add(1);
  }
  // It is called once all parts have succeeded, before the call is complete, and has to be given before the first part. `waits`: it may wait for a
  // device, so it must not be called in a thread of the engine.
  void then(std::function<void()> what, bool waits) {
    then_ = std::move(what);
    waits_ = waits;
  }
  void finish(const std::exception_ptr& error);
  // A thread of the engine calls this instead.
  static void finish_from_engine(const std::shared_ptr<Call>& call, const std::exception_ptr& error);

  const WindowOp op;
  const at::Tensor tensor; // as the program gave it; undefined if nothing is sent
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

// A call asks this of one neighbor.
struct Window::Part {
  WindowOp op;
  double weight;
  std::optional<double> p;
  size_t offset; // in bytes, of what is written into the tensor
  bool mutex;
  at::Tensor data;
  Milliseconds timeout;
  Deadline deadline;
  std::shared_ptr<Call> call;
  uint64_t puts = 0; // of an accumulate by message: that this rank has made to the neighbor's mailbox before
};

// A leg is the way to one neighbor. Its primitives are few, so that another way is another class beside these and nothing else. Writing into a slot and publishing what was written are one of them, as it depends on the way who does
// the second. What is started is done in the order of the calls.
class Window::Leg {
 public:
  Leg(Window& window, Neighbor& neighbor) : window_(window), neighbor_(neighbor) {}
  virtual ~Leg() = default;
  Leg(const Leg&) = delete;
  Leg& operator=(const Leg&) = delete;

  // transport_to() says this.
  virtual const char* name() const = 0;
  // It returns the neighbor's tensor where this process has mapped it, else null.
  virtual char* map() const = 0;
  // It does kPut or kAccumulate (write and publish), kGet (read), kWrite or kSignal, and finishes the part unless it throws.
  virtual void start(Part part) = 0;
  // These are the ways to get and to give back the pair's mutex that the neighbor owns.
  virtual RankMutex::Other mutex() = 0;
  // This rank has ended its use of the neighbor's window: what was started before has been done there.
  virtual void leave() = 0;
  // The group is about to be closed, and nothing may be sent in it from then on: what has to be said comes now, whatever is in flight.
  virtual void on_closing() {}

 protected:
  Window& window_;
  Neighbor& neighbor_;
};

// This process does operations itself, in the caller's thread, so that they are complete on return; but for those that wait for a mutex, which
// a thread of the completion pool does, and for those behind them.
class Window::DirectLeg : public Leg {
 public:
  using Leg::Leg;

  void start(Part part) final;

 protected:
  // It does the part, or hands it to somebody who goes on with it and finishes it: then it returns false.
  virtual bool execute(Part& part) = 0;
  // This rank has to hold the pair's mutex while execute() does that.
  virtual bool needs_mutex(const Part& part) const {
    return part.mutex;
  }

 private:
  // It executes the part unless there is an `error` already, and finishes it after what has to come `between`.
  void perform(Part& part, std::exception_ptr error, const std::function<void()>& between);
  void run_queue();
  // It runs the first of the queue, or ends it with `error` if it is one of the call that `failed`; `locked`: this thread has the
  // mutex. It returns false if there is nothing (else) to run.
  bool run_first(bool locked, const Call* failed, std::exception_ptr error);

  std::mutex queue_mutex_;
  std::deque<Part> queue_;
  bool running_ = false; // a thread is at the queue
  std::mutex turn_; // held by the thread that runs the first of the queue, so that its order stays
};

// The neighbor's memory is mapped.
class Window::MappedLeg final : public DirectLeg {
 public:
  // It returns null unless the neighbor's memory can be mapped.
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
  // It copies the neighbor's tensor into this rank's slot for it.
  void fetch(double weight, Deadline deadline);

  const std::unique_ptr<WindowView> view_;
  PeerControl& control_; // of this rank, there
  const size_t place_;
  const size_t slot_;
};

// Operations go as messages, which the neighbor's WindowService serves.
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
  // The same; it calls `ended`, if there is one, just before it finishes the part.
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
  size_t control = 0; // of it, in this rank's memory
  size_t slot = 0; // if it is an in-neighbor
  bool writes = true; // it may write to this rank's memory itself
  bool tells = false; // it writes by RMA, and tells this rank when it does not any more
  std::unique_ptr<MailboxReader> mailbox; // of what it puts in this rank's pool; null if it cannot
  std::unique_ptr<Leg> leg; // null before connect()
  std::unique_ptr<Leg> raw_leg; // for write() and signal(), if not the same
  std::unique_ptr<RankMutex> mutex_here; // [this rank][it]
  std::unique_ptr<RankMutex> mutex_there; // [it][this rank]
  std::mutex
      writing; // held by the thread that acts as the writer of its slot there, or, without a mailbox, as its engine's in the one here
  std::atomic<bool> gone{false};
  std::atomic<bool> ended{false}; // its process
  std::string how; // it went; guarded by state_
};

// While one of these lives, the memory of this rank and of its neighbors stays.
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
