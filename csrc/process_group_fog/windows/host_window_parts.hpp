// What a HostWindow is made of: its neighbors, and its calls in flight. For the window's own sources.
#pragma once

#include "engine/engine.hpp"
#include "windows/host_window.hpp"

namespace fog {

// How long a wait lasts before it looks whether whom it waits for has gone, and whether it is interrupted.
constexpr auto kLook = std::chrono::milliseconds(10);

struct HostWindow::Neighbor {
  int rank = 0;
  bool in = false;
  bool out = false;
  size_t door = 0; // for it in this rank's memory
  size_t slot = 0; // if it is an in-neighbor
  std::unique_ptr<ForeignWindow> view; // null: it is reached by messages
  bool maps = true; // it may map this rank's memory
  size_t door_there = 0; // for this rank in its memory
  size_t slot_there = 0; // if it is an out-neighbor
  std::unique_ptr<RankMutex> mutex_here; // [this rank][it]
  std::unique_ptr<RankMutex> mutex_there; // [it][this rank]
  std::mutex writing; // held by the thread that acts as the writer of its slot
  std::atomic<bool> gone{false};
  std::atomic<bool> ended{false}; // its process
  std::string how; // it went; guarded by state_

  std::mutex queue_mutex;
  std::deque<Part> queue; // operations that wait for a mutex, and those behind them
  bool running = false; // a thread is at the queue
  std::mutex turn; // held by the thread that runs the first of the queue, so that its order stays
};

// One call, complete once all its parts are.
class HostWindow::Call {
 public:
  Call(std::shared_ptr<HostWindow> window, c10::intrusive_ptr<WorkFog> its_work)
      : work(std::move(its_work)), window_(std::move(window)) {}
  void expect() {
    pending_.fetch_add(1);
  }
  // Called once all parts have succeeded, before the call is complete. To be given before the first part.
  void then(std::function<void()> what) {
    then_ = std::move(what);
  }
  void finish(const std::exception_ptr& error) {
    if (error) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) {
        error_ = error;
      }
    }
    if (pending_.fetch_sub(1) == 1) {
      if (then_ && !error_) {
        try {
          then_();
        } catch (...) {
          error_ = std::current_exception();
        }
      }
      window_->end_call();
      work->complete(error_);
    }
  }

  const c10::intrusive_ptr<WorkFog> work;

 private:
  const std::shared_ptr<HostWindow> window_;
  std::atomic<size_t> pending_{1};
  std::mutex mutex_;
  std::exception_ptr error_;
  std::function<void()> then_;
};

// The memory of this rank and of its neighbors stays.
class HostWindow::Use {
 public:
  Use(HostWindow& window, const char* op, For whom) : window_(window) {
    window_.begin_call(op, whom);
  }
  ~Use() {
    window_.end_call();
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  HostWindow& window_;
};

struct HostWindow::Part {
  WindowOp op;
  Neighbor* neighbor;
  double weight;
  std::optional<double> p;
  size_t offset; // in bytes, of what is written into the tensor
  bool mutex;
  at::Tensor data;
  Milliseconds timeout;
  Deadline deadline;
  std::shared_ptr<Call> call;
};

} // namespace fog
