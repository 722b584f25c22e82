// The Work of an operation that fog makes of a delegate's.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "device/stream.hpp"

namespace fog::device {

// Runs `function`; what it throws becomes a DistBackendError, but for ValueError and TypeError, that begins with `what`, the
// operation's name.
template <typename Function>
auto naming(const std::string& what, const Function& function);

// The device has everything to do already. As with NCCL, wait() orders the current stream after the operation and does not
// block the host, whatever time-out it is given; callbacks of the Future run at once, on streams that are ordered after it.
// Failures are those of the delegate's works.
class Work : public c10d::Work {
 public:
  struct Description {
    int rank;
    c10d::OpType type;
    std::string what; // for errors: "neighbor_allreduce #3 of group '0' on cuda:0"
    uint64_t sequence;
  };
  // To be made while the operation's stream is the current one. `parts` are the delegate's works. `launched_on` is the program's
  // stream at the time of the call, `stream` the operation's; none on a cpu.
  // What the profiler sees of the operation is its caller's business.
  Work(
      Description description,
      const std::vector<at::Tensor>& inputs,
      std::vector<at::Tensor> outputs,
      std::vector<c10::intrusive_ptr<c10d::Work>> parts,
      const Stream& stream,
      std::optional<c10::Stream> launched_on);
  ~Work() override;

  // These two ask the device: not while it is being captured. They ask the delegate's works too, which may learn of a failure only then.
  bool isCompleted() override;
  bool isSuccess() const override;
  // What is known of failures.
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  // The base's blocks the stream until the Future is completed, which it is at once.
  void blockCurrentStream() override {
    synchronize();
  }
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

 private:
  void release();
  bool has_failed() const;

  const std::string what_;
  const uint64_t sequence_;
  const std::vector<at::Tensor> outputs_;
  const std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
  const std::optional<c10::Stream> stream_;
  const std::optional<c10::Stream> launched_on_;
  const Event end_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::mutex held_mutex_;
  std::vector<at::Tensor> held_; // the program's tensors that the operation's stream uses, until release()
};

[[noreturn]] void throw_named(const std::string& what, const std::exception_ptr& error);

template <typename Function>
auto naming(const std::string& what, const Function& function) {
  try {
    return function();
  } catch (...) {
    throw_named(what, std::current_exception());
  }
}

} // namespace fog::device
