#include "engine/work.hpp"

#include <new>
#include <thread>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include "core/deadline.hpp"
#include "core/failure.hpp"
#include "core/python_lock.hpp"
#include "engine/engine.hpp"

namespace fog {

using Clock = std::chrono::steady_clock;

namespace {

// Created while there is memory, and without a backtrace: collecting a Python stack takes milliseconds.
const std::exception_ptr& no_memory_at_all() {
  static const auto error = std::make_exception_ptr(
      c10::DistBackendError("fog: there is no memory for an operation's result, nor to say which one it is", c10::Backtrace()));
  return error;
}

// The error for an operation that completed but for lack of memory.
std::exception_ptr no_memory_for_result(const std::function<std::string()>& describe) {
  constexpr int kTries = 100; // other threads may free memory meanwhile
  for (int tries = 0; tries < kTries; ++tries) {
    try {
      return backend_error(c10::str("fog: ", describe ? describe() : std::string("operation"), ": no memory for its result"));
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return no_memory_at_all();
}

} // namespace

WorkFog::WorkFog(
    Engine& engine, int rank, c10d::OpType type, const char* profiling_title, at::TensorList inputs, std::vector<at::Tensor> outputs)
    // The base class creates an object for the profiler even if no profiler runs, unless the title is null.
    : Work(
          rank,
          type,
          at::hasCallbacks() ? profiling_title : nullptr,
          at::hasCallbacks() ? std::make_optional(inputs.vec()) : std::nullopt),
      engine_(engine),
      outputs_(std::move(outputs)) {
  no_memory_at_all();
}

c10::intrusive_ptr<WorkFog> WorkFog::when_all(
    Engine& engine,
    int rank,
    c10d::OpType type,
    std::vector<c10::intrusive_ptr<WorkFog>> parts,
    std::optional<std::vector<at::Tensor>> outputs) {
  struct Kept {
    c10::intrusive_ptr<WorkFog> whole;
    std::vector<c10::intrusive_ptr<WorkFog>> parts;
    std::optional<std::vector<at::Tensor>> outputs;
  };
  struct Pending {
    std::shared_ptr<Kept> kept;
    std::atomic<size_t> count;
    std::mutex mutex;
    std::exception_ptr error;
  };
  auto whole = c10::make_intrusive<WorkFog>(engine, rank, type, nullptr, at::TensorList(), std::vector<at::Tensor>());
  if (parts.empty()) {
    whole->complete(nullptr);
    return whole;
  }
  whole->sequence_ = parts.back()->sequence_;
  whole->set_describe([parts] { return parts.front()->describe(); });
  auto pending = std::make_shared<Pending>();
  pending->kept = std::make_shared<Kept>(Kept{whole, parts, std::move(outputs)});
  pending->count = parts.size();
  for (size_t index = 0; index < parts.size(); ++index) {
    parts[index]->future()->addCallback([pending, index](c10::ivalue::Future& future) {
      if (future.hasError()) {
        std::lock_guard<std::mutex> lock(pending->mutex);
        if (!pending->error) {
          pending->error = future.exception_ptr();
        }
      }
      if (--pending->count > 0) {
        return;
      }
      auto error = pending->error;
      auto kept = std::move(pending->kept);
      auto& [whole, parts, outputs] = *kept;
      try {
        std::vector<at::Tensor> all;
        for (const auto& each : parts) {
          all.insert(all.end(), each->outputs_.begin(), each->outputs_.end());
        }
        whole->set_outputs(outputs.value_or(std::move(all)));
      } catch (const std::bad_alloc&) {
        error = no_memory_for_result(nullptr);
      }
      whole->complete(error);
      // The end of a tensor may have to wait for Python's lock. So they stay as long as the operation of this part, which a
      // thread that drives for others does not destroy.
      const auto last = std::move(parts[index]);
      last->kept_ = std::move(kept);
    });
  }
  return whole;
}

void WorkFog::complete(std::exception_ptr error) {
  ended_ = Clock::now();
  std::function<std::string()> describe; // refers to the operation, which ends here; destroyed without the lock
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    describe.swap(describe_);
    future = future_;
  }
  c10::IValue value;
  try {
    if (!error && future) {
      value = c10::IValue(outputs_);
    }
  } catch (const std::bad_alloc&) { // the following steps allocate no memory
    error = no_memory_for_result(describe);
  }
  // Complete the Work first, then its Future: a callback may wait for the Work.
  finish(error);
  bool is_late = false; // the Future was requested meanwhile
  {
    std::lock_guard<std::mutex> lock(mutex_);
    done_.store(true); // a Future that is created after this is complete from the start
    is_late = future_ && !future;
    future = future_;
  }
  engine_.wake_waiters();
  if (!future) {
    return;
  }
  try {
    if (!error && is_late) {
      value = c10::IValue(outputs_);
    }
  } catch (const std::bad_alloc&) {
    error = no_memory_at_all();
  }
  const auto mark = [future, value = std::move(value), error] {
    if (error) {
      future->setErrorIfNeeded(error);
    } else {
      future->markCompleted(value);
    }
  };
  bool given = false;
  if (future_taken_.load()) {
    try {
      using Refused = CompletionPool::Refused;
      engine_.run_callbacks(mark, future_taken_by_callback_.load() ? Refused::kRunHere : Refused::kQueue);
      given = true;
    } catch (const std::exception&) { // no memory for the queue
    }
  }
  if (!given) {
    report_unowned_failure("a callback", mark);
  }
}

bool WorkFog::isCompleted() {
  if (!done_.load(std::memory_order_acquire)) {
    engine_.drive_once(done_);
  }
  return done_.load(std::memory_order_acquire);
}

bool WorkFog::isSuccess() const {
  return done_.load(std::memory_order_acquire) && !exception();
}

int WorkFog::sourceRank() const {
  return done_.load(std::memory_order_acquire) ? source_ : -1;
}

std::vector<at::Tensor> WorkFog::result() {
  TORCH_CHECK(done_.load(std::memory_order_acquire), "fog: result() of an operation that is still in flight; call wait() first");
  return outputs_;
}

void WorkFog::synchronize() {
  wait(kNoTimeout);
}

bool WorkFog::wait(std::chrono::milliseconds timeout) {
  if (!done_.load(std::memory_order_acquire)) {
    // Without a timeout of its own, the wait ends with the operation, which has the group's timeout.
    const auto deadline = timeout > kNoTimeout ? deadline_after(timeout) : Deadline::max();
    bool done = false;
    without_python_lock([&] { done = engine_.drive_until(done_, deadline); });
    if (!done) {
      const auto what = describe();
      C10_THROW_ERROR(
          DistBackendError,
          c10::str(
              "fog: wait() timed out after ", timeout.count(), " ms: ", what.empty() ? "operation" : what,
              ". The operation goes on; wait() may be called again."));
    }
  }
  if (future_taken_.load()) {
    wait_for_future(); // it is marked right after the Work: after a wait for either, both are complete
  }
  if (exception()) {
    std::rethrow_exception(exception());
  }
  return true;
}

// Waits for the Future of a complete Work: the thread that completed the Work marks the Future next.
void WorkFog::wait_for_future() {
  if (!future_->completed()) {
    without_python_lock([this] { future_->wait(); });
  }
}

// Empty once the operation has ended.
std::string WorkFog::describe() {
  std::function<std::string()> describe;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    describe = describe_;
  }
  return describe ? describe() : std::string();
}

c10::intrusive_ptr<c10::ivalue::Future> WorkFog::getFuture() {
  if (CompletionPool::is_current_thread()) {
    future_taken_by_callback_.store(true);
  }
  auto taken = future();
  future_taken_.store(true);
  if (done_.load()) {
    wait_for_future();
  }
  return taken;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkFog::future() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!future_) {
    auto made = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
    if (done_.load()) { // no callbacks can be registered yet, so none run here
      if (exception_) {
        made->setError(exception_);
      } else {
        made->markCompleted(c10::IValue(outputs_));
      }
    }
    future_ = std::move(made);
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
