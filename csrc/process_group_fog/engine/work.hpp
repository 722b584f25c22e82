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

// Interface for driving operations while a thread waits; the engine implements it.
class Driver {
 public:
  virtual ~Driver() = default;
  // Makes progress until `done` is set or `deadline` has passed, without Python's lock; returns whether `done` is set.
  // May throw an exception of the program's interrupt check (Ctrl-C).
  virtual bool drive_until(const std::atomic<bool>& done, std::chrono::steady_clock::time_point deadline) = 0;
  // Makes progress once, if there is anything to do and no other thread does it. A thread that only polls `done` sleeps
  // for short times until `done` may be set. Long steps are done without Python's lock.
  virtual void drive_once(const std::atomic<bool>& done) = 0;
  // Runs callbacks, which may block, in a thread that no other thread waits for.
  virtual void run_callbacks(std::function<void()> callbacks, CompletionPool::Refused refused) = 0;
  // Wakes the threads in drive_until(): their operations may be done.
  virtual void wake_waiters() = 0;
};

// Keeps a reference to the data that it needs, but never to the group. wait() drives the engine; any thread may call
// it, several times. c10d calls some functions with Python's lock held: they neither wait nor compute while they hold
// it.
class WorkFog : public c10d::Work {
 public:
  WorkFog(
      Driver& driver, int rank, c10d::OpType type, const char* profiling_title, at::TensorList inputs, std::vector<at::Tensor> outputs);

  // A Work that is complete when all of `parts` are; it fails with the first failure among them. Its result is
  // `outputs`, or otherwise the results of the parts in order.
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
  // Throws the operation's failure, or DistBackendError after `timeout`; in that case the operation itself continues.
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
  // Sets a function that says what the operation is and which ranks it waits for. The function must not be called with
  // the engine's lock held.
  void set_describe(std::function<std::string()> describe) {
    describe_ = std::move(describe);
  }
  void set_abort(std::function<void()> abort) {
    abort_ = std::move(abort);
  }

 private:
  // Created at the first request, because few programs need it.
  c10::intrusive_ptr<c10::ivalue::Future> future();
  std::string describe();
  void wait_for_future();

  Driver& driver_;
  std::atomic<bool> done_{false};
  std::atomic<bool> future_taken_{false}; // the Future may have callbacks or waiting threads
  // the program that waits for it may occupy one of the threads that complete Futures
  std::atomic<bool> future_taken_by_callback_{false};
  std::vector<at::Tensor> outputs_;
  int source_ = -1;
  uint64_t sequence_ = 0;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point ended_;
  std::function<std::string()> describe_; // guarded by mutex_, as are the next two
  std::function<void()> abort_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::shared_ptr<void> kept_; // what is destroyed with it, see when_all()
};

} // namespace fog
