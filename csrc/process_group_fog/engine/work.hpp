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

namespace fog {

class Engine;

// Keeps a reference to the data that it needs, but never to the group. wait() drives the engine; any thread may call
// it, several times. c10d calls some functions with Python's lock held: they neither wait nor compute while they hold
// it.
class WorkFog : public c10d::Work {
 public:
  WorkFog(
      Engine& engine, int rank, c10d::OpType type, const char* profiling_title, at::TensorList inputs, std::vector<at::Tensor> outputs);

  // A Work that is complete when all of `parts` are; it fails with the first failure among them. Its result is
  // `outputs`, or otherwise the results of the parts in order.
  static c10::intrusive_ptr<WorkFog> when_all(
      Engine& engine,
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

 private:
  // Created at the first request, because few programs need it.
  c10::intrusive_ptr<c10::ivalue::Future> future();
  std::string describe();
  void wait_for_future();

  Engine& engine_;
  std::atomic<bool> done_{false};
  std::atomic<bool> future_taken_{false}; // the Future may have callbacks or waiting threads
  // the program that waits for it may occupy one of the threads that complete Futures
  std::atomic<bool> future_taken_by_callback_{false};
  std::vector<at::Tensor> outputs_;
  int source_ = -1;
  uint64_t sequence_ = 0;
  const std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point ended_;
  std::function<std::string()> describe_; // guarded by mutex_, as is the next one
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::shared_ptr<void> kept_; // what is destroyed with it, see when_all()
};

} // namespace fog
