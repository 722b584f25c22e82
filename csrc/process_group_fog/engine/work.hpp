// The Work that every operation of fog returns.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "engine/completion_pool.hpp"

namespace fog {

// What drives operations forward while somebody waits; the engine of a transport.
class Driver {
 public:
  virtual ~Driver() = default;
  // Makes progress until `done` is set or `deadline` has passed, without Python's lock; true if `done` is set. May throw what
  // the program's interrupt check throws (Ctrl-C).
  virtual bool drive_until(const std::atomic<bool>& done, std::chrono::steady_clock::time_point deadline) = 0;
  // Makes progress once, if there is anything to do and nobody else is at it. A thread that does nothing but ask whether
  // `done` is set sleeps for moments, until it may be. Whatever takes time is done without Python's lock.
  virtual void drive_once(const std::atomic<bool>& done) = 0;
  // Runs callbacks, which may block, in a thread that nobody else waits for.
  virtual void run_callbacks(std::function<void()> callbacks, CompletionPool::Refused refused) = 0;
  // What a thread in drive_until() waits for may be done.
  virtual void wake_waiters() = 0;
};

// Holds what it needs and never the group. wait() drives the engine; it may be called from any thread, several times. c10d
// calls some of these with Python's lock: nothing is waited for, or computed, with it.
class WorkFog : public c10d::Work {
 public:
  WorkFog(
      Driver& driver, int rank, c10d::OpType type, const char* profiling_title, at::TensorList inputs, std::vector<at::Tensor> outputs);

  // One Work that is complete when all of `parts` are; fails with the first failure among them. Its result is `outputs`, or
  // else those of the parts, one after the other.
  static c10::intrusive_ptr<WorkFog> when_all(
      Driver& driver,
      int rank,
      c10d::OpType type,
      std::vector<c10::intrusive_ptr<WorkFog>> parts,
      std::optional<std::vector<at::Tensor>> outputs = std::nullopt);

  bool isCompleted() override;
  bool isSuccess() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  // Throws the operation's failure, or DistBackendError after `timeout` (then the operation itself goes on).
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;
  float getDuration() const override;

  // --- for the engine, once each, outside of its lock ---
  void complete(std::exception_ptr error);
  void set_outputs(std::vector<at::Tensor> outputs) {
    outputs_ = std::move(outputs);
  }
  void set_source(int source) {
    source_ = source;
  }
  void set_sequence(uint64_t sequence) {
    sequence_ = sequence;
  }
  // Says what the operation is and whom it waits for; must not be called with the engine's lock held.
  void set_describe(std::function<std::string()> describe) {
    describe_ = std::move(describe);
  }
  void set_abort(std::function<void()> abort) {
    abort_ = std::move(abort);
  }

 private:
  // Made when it is first asked for, as hardly anybody does.
  c10::intrusive_ptr<c10::ivalue::Future> future();
  std::string describe();
  void wait_for_future();

  Driver& driver_;
  std::atomic<bool> done_{false};
  std::atomic<bool> future_taken_{false}; // so it may have callbacks, or somebody who waits for it
  std::atomic<bool> future_taken_by_callback_{false}; // who waits for it may hold one of the threads that complete Futures
  std::vector<at::Tensor> outputs_;
  int source_ = -1;
  uint64_t sequence_ = 0;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point ended_;
  std::function<std::string()> describe_; // guarded by mutex_, as are the next two
  std::function<void()> abort_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace fog
