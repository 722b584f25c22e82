// The Work of fog's own operations that use a delegate.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "device/stream.hpp"

namespace fog::device {

// Runs `function`. Its exceptions, except ValueError and TypeError, become a DistBackendError that begins with `what`,
// the operation's name.
template <typename Function>
auto naming(const std::string& what, const Function& function);

// The whole operation is queued on the device already. As with NCCL, wait() makes the current stream wait for the
// operation and does not block the host, whatever the timeout. Callbacks of the Future run at once, on streams that
// wait for the operation. Failures are those of the delegate's Works.
class Work : public c10d::Work {
 public:
  struct Description {
    int rank;
    c10d::OpType type;
    std::string what; // for errors: "neighbor_allreduce #3 of group '0' on cuda:0"
    uint64_t sequence;
  };
  // Must be constructed while the operation's stream is the current one. `parts` are the delegate's Works.
  // `launched_on` is the program's stream at the time of the call, `stream` the operation's. The caller records the
  // operation for the profiler.
  Work(
      Description description,
      const std::vector<at::Tensor>& inputs,
      std::vector<at::Tensor> outputs,
      std::vector<c10::intrusive_ptr<c10d::Work>> parts,
      const Stream& stream,
      c10::Stream launched_on);
  ~Work() override;

  // These two query the device, so they must not be called while it is being captured. They also query the delegate's
  // Works, which may learn of a failure only then.
  bool isCompleted() override;
  bool isSuccess() const override;
  // The failure, as far as it is known.
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  // The base class would block the stream until the Future is complete, but this Future is complete from the start.
  void blockCurrentStream() override {
    synchronize();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

 private:
  void release();
  bool has_failed() const;

  const std::string what_;
  const uint64_t sequence_;
  const std::vector<at::Tensor> outputs_;
  const std::vector<c10::intrusive_ptr<c10d::Work>> parts_;
  const c10::Stream stream_;
  const c10::Stream launched_on_;
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
