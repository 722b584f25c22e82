#include "device/work.hpp"

#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

namespace fog::device {

void throw_named(const std::string& what, const std::exception_ptr& error) {
  std::string reason = "unknown error";
  try {
    std::rethrow_exception(error);
  } catch (const c10::ValueError& failure) {
    C10_THROW_ERROR(ValueError, c10::str(what, ": ", failure.what_without_backtrace()));
  } catch (const c10::TypeError& failure) {
    C10_THROW_ERROR(TypeError, c10::str(what, ": ", failure.what_without_backtrace()));
  } catch (const c10::Error& failure) {
    reason = failure.what_without_backtrace();
  } catch (const std::exception& failure) {
    reason = failure.what();
  } catch (...) {
  }
  C10_THROW_ERROR(DistBackendError, c10::str("fog: ", what, ": ", reason));
}

Work::Work(
    Description description,
    const std::vector<at::Tensor>& inputs,
    std::vector<at::Tensor> outputs,
    std::vector<c10::intrusive_ptr<c10d::Work>> parts,
    const Stream& stream,
    c10::Stream launched_on)
    : c10d::Work(description.rank, description.type),
      what_(std::move(description.what)),
      sequence_(description.sequence),
      outputs_(std::move(outputs)),
      parts_(std::move(parts)),
      stream_(stream.get()),
      launched_on_(launched_on),
      end_(stream.record()) {
  const std::vector<at::Device> devices{stream_.device()};
  held_ = inputs;
  held_.insert(held_.end(), outputs_.begin(), outputs_.end());
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  future_->markCompleted(c10::IValue(outputs_)); // the Future remembers the current stream, which is the operation's
}

Work::~Work() {
  // No wait() was called: the tensors' memory must not be reused before the stream has finished.
  for (const auto& tensor : held_) {
    try {
      use_on(stream_, tensor);
    } catch (const std::exception&) { // the device has ended, and its memory with it
    }
  }
}

// Once the stream of the call waits for the operation, memory that is freed on that stream can be reused safely.
void Work::release() {
  const std::lock_guard<std::mutex> lock(held_mutex_);
  if (held_.empty()) {
    return;
  }
  if (current_stream(stream_.device()) != launched_on_) {
    for (const auto& tensor : held_) {
      use_on(stream_, tensor);
    }
  }
  held_.clear();
}

// The watchdog of torch's NCCL checks a copy of each of its Works. The Work here learns of an error only when it is
// asked whether it is complete.
bool Work::has_failed() const {
  for (const auto& part : parts_) {
    part->isCompleted();
  }
  return exception() != nullptr;
}

bool Work::isCompleted() {
  return has_failed() || has_happened(end_);
}

bool Work::isSuccess() const {
  return !has_failed() && has_happened(end_);
}

std::exception_ptr Work::exception() const {
  for (const auto& part : parts_) {
    if (const auto failure = part->exception()) {
      try {
        throw_named(what_, failure);
      } catch (...) {
        return std::current_exception();
      }
    }
  }
  return nullptr;
}

std::vector<at::Tensor> Work::result() {
  return outputs_;
}

void Work::synchronize() {
  wait(kNoTimeout);
}

bool Work::wait(std::chrono::milliseconds /*timeout*/) {
  if (const auto failure = exception()) {
    std::rethrow_exception(failure);
  }
  order_after(end_);
  release();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  return future_;
}

uint64_t Work::getSequencenumber() const {
  return sequence_;
}

} // namespace fog::device
