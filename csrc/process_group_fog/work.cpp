#include "work.hpp"

#include <c10/util/Exception.h>

#include "deadline.hpp"

namespace fog {

using Clock = std::chrono::steady_clock;

WorkFog::WorkFog(
    Driver& driver,
    int rank,
    c10d::OpType type,
    const char* profiling_title,
    const std::vector<at::Tensor>& inputs,
    std::vector<at::Tensor> outputs)
    : Work(rank, type, profiling_title, inputs),
      driver_(driver),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

c10::intrusive_ptr<WorkFog> WorkFog::when_all(
    Driver& driver,
    int rank,
    c10d::OpType type,
    std::vector<c10::intrusive_ptr<WorkFog>> parts,
    std::optional<std::vector<at::Tensor>> outputs) {
  struct Pending {
    std::atomic<size_t> count;
    std::mutex mutex;
    std::exception_ptr error;
  };
  auto whole = c10::make_intrusive<WorkFog>(driver, rank, type, nullptr, std::vector<at::Tensor>(), std::vector<at::Tensor>());
  if (parts.empty()) {
    whole->complete(nullptr);
    return whole;
  }
  whole->sequence_ = parts.back()->sequence_;
  whole->set_describe([parts] { return parts.front()->describe_ ? parts.front()->describe_() : std::string(); });
  whole->set_abort([parts] {
    for (const auto& part : parts) {
      part->abort();
    }
  });
  auto pending = std::make_shared<Pending>();
  pending->count = parts.size();
  for (const auto& part : parts) {
    part->future_->addCallback([whole, pending, parts, outputs](c10::ivalue::Future& future) {
      if (future.hasError()) {
        std::lock_guard<std::mutex> lock(pending->mutex);
        if (!pending->error) {
          pending->error = future.exception_ptr();
        }
      }
      if (--pending->count > 0) {
        return;
      }
      std::vector<at::Tensor> all;
      for (const auto& each : parts) {
        all.insert(all.end(), each->outputs_.begin(), each->outputs_.end());
      }
      whole->set_outputs(outputs.value_or(std::move(all)));
      whole->complete(pending->error);
    });
  }
  return whole;
}

void WorkFog::complete(std::exception_ptr error) {
  ended_ = Clock::now();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    describe_ = nullptr; // these refer to the operation, whose life ends here
    abort_ = nullptr;
  }
  // The Work first, then its Future: a callback may wait for the Work.
  finish(error);
  done_.store(true);
  auto mark = [future = future_, outputs = outputs_, error] {
    if (error) {
      future->setErrorIfNeeded(error);
    } else {
      future->markCompleted(c10::IValue(outputs));
    }
  };
  if (future_taken_.load()) {
    driver_.run_callbacks(std::move(mark));
  } else {
    mark();
  }
}

bool WorkFog::isCompleted() {
  if (!done_.load(std::memory_order_acquire)) {
    driver_.drive_once();
  }
  return done_.load(std::memory_order_acquire);
}

bool WorkFog::isSuccess() const {
  return done_.load(std::memory_order_acquire) && !exception();
}

int WorkFog::sourceRank() const {
  return source_;
}

std::vector<at::Tensor> WorkFog::result() {
  TORCH_CHECK(
      done_.load(std::memory_order_acquire), "fog: result() of an operation that is still in flight; call wait() first");
  return outputs_;
}

void WorkFog::synchronize() {
  wait(kNoTimeout);
}

bool WorkFog::wait(std::chrono::milliseconds timeout) {
  if (!done_.load(std::memory_order_acquire)) {
    // Without a time-out of its own the wait ends with the operation, which has the group's.
    const auto deadline = timeout > kNoTimeout ? deadline_after(timeout) : Deadline::max();
    if (!driver_.drive_until(done_, deadline)) {
      std::function<std::string()> describe;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        describe = describe_;
      }
      C10_THROW_ERROR(
          DistBackendError,
          c10::str(
              "fog: wait() timed out after ", timeout.count(), " ms: ", describe ? describe() : std::string("operation"),
              ". The operation goes on; wait() may be called again."));
    }
  }
  if (future_taken_.load()) {
    future_->wait(); // marked right after the Work: whoever waited for one finds the other complete
  }
  if (exception()) {
    std::rethrow_exception(exception());
  }
  return true;
}

void WorkFog::abort() {
  std::function<void()> abort;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    abort = abort_;
  }
  if (abort) {
    abort();
  }
}

c10::intrusive_ptr<c10::ivalue::Future> WorkFog::getFuture() {
  future_taken_.store(true);
  if (done_.load()) {
    future_->wait(); // the thread that completed the Work is about to mark it, if it has not
  }
  return future_;
}

uint64_t WorkFog::getSequencenumber() const {
  return sequence_;
}

float WorkFog::getDuration() const {
  TORCH_CHECK(done_.load(std::memory_order_acquire), "fog: getDuration() of an operation that is still in flight");
  return std::chrono::duration<float, std::milli>(ended_ - started_).count();
}

} // namespace fog
