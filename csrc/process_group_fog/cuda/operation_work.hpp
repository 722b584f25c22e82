// The Works of operations that the device has been given as a whole, with kernels of fog's that say how they ended.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "cuda/pinned_memory.hpp"
#include "cuda/stream.hpp"

namespace fog::cuda {

// Words of page-locked host memory that kernels write to. Those of operations in flight keep it.
class HostCells {
 public:
  explicit HostCells(const at::Device& device) : device_(device) {}

  // One that is 0.
  volatile uint64_t* take();
  void give_back(volatile uint64_t* cell);

 private:
  const at::Device device_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<MappedMemory>> blocks_;
  std::vector<volatile uint64_t*> unused_;
};

// How an operation ends, as the device will have said when the event has happened.
struct Outcome {
  Outcome(std::shared_ptr<HostCells> its_cells, std::function<std::exception_ptr(int)> its_failure);
  ~Outcome();
  Outcome(const Outcome&) = delete;
  Outcome& operator=(const Outcome&) = delete;

  // What the device writes to: 0, or what `failure` is called with.
  volatile int* word() const {
    return reinterpret_cast<volatile int*>(cell);
  }
  // Null as long as it may yet end well.
  std::exception_ptr error();

  const std::shared_ptr<HostCells> cells;
  volatile uint64_t* const cell;
  const std::function<std::exception_ptr(int)> failure; // of the part with that number, from 1 on
  Event end;
  std::atomic<bool> heard{false};
};

// The operation "fog:" + `op` in the program's trace, from here to the end of the block that gives the device what it consists of.
class OperationRange {
 public:
  explicit OperationRange(const char* op) {
    if (range_.isActive()) {
      range_.before(std::string("fog:") + op);
    }
  }

 private:
  at::RecordFunction range_{at::RecordScope::USER_SCOPE};
};

class OperationWork final : public c10d::Work {
 public:
  // To be made while the operation's stream is the current one. Without an outcome nothing was started, and `error` says why.
  OperationWork(
      int rank, const at::Device& device, std::vector<at::Tensor> tensors, std::shared_ptr<Outcome> outcome, std::exception_ptr error);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  // Orders the current stream after the operation; the host goes on.
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void blockCurrentStream() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<at::Tensor> tensors_;
  const std::shared_ptr<Outcome> outcome_;
  const std::exception_ptr error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace fog::cuda
