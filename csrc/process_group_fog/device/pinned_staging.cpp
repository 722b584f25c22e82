#include "device/pinned_staging.hpp"

#include <algorithm>
#include <thread>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "device/runtime.hpp"
#include "engine/engine.hpp"

namespace fog::device {
namespace {

using Clock = std::chrono::steady_clock;

// The first and the longest sleep between two checks of an event.
constexpr auto kShortest = std::chrono::microseconds(5);
constexpr auto kLongest = std::chrono::microseconds(500);

constexpr unsigned kPortable = 1; // cudaHostRegisterPortable: page-locked for every context of the process

// Returns a page-locked CPU tensor, or an ordinary one if the device's allocator has no such memory: copies are then
// slower, and the host may wait for them.
at::Tensor empty_pinned(at::IntArrayRef sizes, c10::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
  try {
    return at::empty(sizes, options.pinned_memory(true));
  } catch (const std::exception&) { // this device's allocator has no pinned memory
    return at::empty(sizes, options);
  }
}

// Copies without autograd or the version counter.
void copy_values(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView no_grad;
  to.copy_(from, true);
}

at::Tensor flat_values(const at::Tensor& tensor) {
  const c10::InferenceMode normal(false);
  return tensor.detach().view({-1});
}

// Keeps memory that the device may use until an event for which no thread waits any longer.
void keep_until(const Event& event, std::vector<at::Tensor> tensors) {
  struct Kept {
    Event event;
    std::vector<at::Tensor> tensors;
  };
  static auto* mutex = new std::mutex; // never destroyed, so the order of destruction does not matter
  static auto* all = new std::vector<Kept>;
  const std::lock_guard<std::mutex> lock(*mutex);
  all->erase(std::remove_if(all->begin(), all->end(), [](const Kept& kept) { return has_happened(kept.event); }), all->end());
  all->push_back({event, std::move(tensors)});
}

} // namespace

PinnedMemory::PinnedMemory(const at::Device& device, void* memory, size_t bytes) : device_(device) {
  auto* lock = of_runtime<int(void*, size_t, unsigned)>("cudaHostRegister");
  if (lock == nullptr || bytes == 0) {
    return;
  }
  const c10::DeviceGuard guard(device); // if there is no context yet, the runtime creates one on this device
  if (lock(memory, bytes, kPortable) == 0) {
    memory_ = memory;
  } else { // for example pages of another window that are locked already
    forget_error();
  }
}

PinnedMemory::~PinnedMemory() {
  if (memory_ == nullptr) {
    return;
  }
  try {
    const c10::DeviceGuard guard(device_);
    if (of_runtime<int(void*)>("cudaHostUnregister")(memory_) != 0) {
      forget_error();
    }
  } catch (const std::exception&) { // the device has ended with the process
  }
}

PinnedStaging::PinnedStaging(Window& window)
    : window_(window),
      device_(window.tensor().device()),
      published_(window.host_tensor()),
      flat_(flat_values(window.tensor())),
      stream_(device_),
      received_(device_, Stream::From::kDevice),
      pinned_(device_, published_.mutable_data_ptr(), window.bytes()) {}

PinnedStaging::~PinnedStaging() {
  if (read_ && !is_known_to_have_happened(read_)) { // the device must be done before the memory is unlocked
    try {
      await("Window.free", read_, deadline_after(window_.timeout()));
    } catch (const std::exception&) {
    }
  }
}

void PinnedStaging::check(const char* op) const {
  TORCH_CHECK(!is_capturing(device_), "fog: ", window_.describe(op), " cannot be captured into a graph");
}

void PinnedStaging::submit(const char* op, const at::Tensor& tensor, Deadline deadline, Go go, Fail fail) {
  Operation operation{op, deadline, tensor, {}, nullptr, std::move(go), std::move(fail)};
  if (tensor.defined()) {
    {
      const c10::InferenceMode normal(false);
      operation.staged = empty_pinned(tensor.sizes(), published_.scalar_type()); // torch keeps such memory for the next use
    }
    const Stream::Guard guard(stream_);
    copy_values(operation.staged, tensor);
    operation.copied = stream_.record();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (window_.holds_mutex()) { // other threads would wait for the mutex, so this thread runs the operation
    while (running_) { // after the earlier operations have started
      lock.unlock();
      window_.engine().check_interrupt();
      lock.lock();
      idle_.wait_for(lock, kPollInterval, [this] { return !running_; });
    }
    lock.unlock();
    run(std::move(operation));
    return;
  }
  queue_.push_back(std::move(operation));
  if (!running_) {
    running_ = true;
    lock.unlock();
    window_.engine().run_callbacks([this, window = window_.shared_from_this()] { run_queue(); });
  }
}

void PinnedStaging::run_queue() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!queue_.empty()) {
    auto operation = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    run(std::move(operation));
    lock.lock();
  }
  running_ = false;
  idle_.notify_all();
}

void PinnedStaging::run(Operation operation) {
  try {
    if (operation.copied) {
      await(operation.name, operation.copied, operation.deadline);
    }
  } catch (...) { // the copy may still be in progress
    keep_until(operation.copied, {operation.tensor, operation.staged});
    operation.fail(std::current_exception());
    return;
  }
  try {
    operation.go(operation.staged);
  } catch (...) {
    operation.fail(std::current_exception());
  }
}

void PinnedStaging::finish(const char* op, const at::Tensor& tensor, const at::Tensor& staged, bool changed, Deadline deadline) {
  if (changed) {
    Event copied;
    {
      const c10::OptionalStreamGuard guard(stream_.get());
      copy_values(tensor, staged);
      copied = stream_.record();
    }
    try {
      await(op, copied, deadline);
    } catch (...) {
      keep_until(copied, {tensor, staged});
      throw;
    }
    Window::count_change(tensor);
    // the window's tensor has changed, so publish it
    if (tensor.const_data_ptr() == flat_.const_data_ptr() && tensor.is_contiguous()) {
      const std::lock_guard<std::mutex> owner(owner_);
      await(op, read_, deadline);
      window_.publish([&] { published_.copy_(staged); });
    }
  }
}

void PinnedStaging::copy_to_published(const char* op, Deadline deadline) {
  await(op, read_, deadline);
  // The device may be busy for long: wait before publishing, so that neighbors do not have to wait for that.
  await(op, record_on(current_stream(device_)), deadline);
  window_.publish([&] {
    const c10::OptionalStreamGuard guard(stream_.get());
    copy_values(published_, window_.tensor());
    // if await() fails, this event also keeps the copy from being changed before it is written
    read_ = stream_.record();
    await(op, read_, deadline);
  });
}

void PinnedStaging::publish(const char* op, Deadline deadline) {
  const std::lock_guard<std::mutex> owner(owner_);
  copy_to_published(op, deadline);
}

at::Tensor PinnedStaging::update(
    const char* op, bool reads, bool clone, const std::function<at::Tensor()>& combine, Deadline deadline) {
  const std::lock_guard<std::mutex> owner(owner_);
  await(op, read_, deadline);
  if (reads) {
    copy_to_published(op, deadline);
  }
  const auto combined = combine();
  const auto& tensor = window_.tensor();
  if (clone) {
    const c10::InferenceMode normal(false);
    const auto result = at::empty(tensor.sizes(), tensor.options().requires_grad(false));
    result.copy_(combined); // combine() returned memory of its own; this copy waits
    return result;
  }
  copy_values(tensor, combined);
  Window::count_change(tensor);
  read_ = record_on(current_stream(device_));
  return tensor;
}

// Data of c10d's put() is copied to the device in the engine's thread, so that signals come after it.
void PinnedStaging::receive(size_t offset, const void* data, size_t bytes) {
  const auto size = static_cast<size_t>(flat_.element_size());
  const auto from =
      at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes / size)}, at::TensorOptions().dtype(flat_.scalar_type()));
  const c10::OptionalStreamGuard guard(received_.get());
  copy_values(flat_.narrow(0, static_cast<int64_t>(offset / size), from.numel()), from);
  if (const auto event = received_.record()) {
    event->synchronize();
  }
}

void PinnedStaging::drain(const char* op, Deadline deadline) {
  const std::lock_guard<std::mutex> owner(owner_);
  await(op, read_, deadline);
}

void PinnedStaging::await(const char* op, const Event& event, Deadline deadline) const {
  std::chrono::nanoseconds pause = kShortest;
  while (!has_happened(event)) {
    if (Clock::now() >= deadline) {
      window_.fail(op, c10::str("timed out waiting for ", device_, " to complete its earlier work"));
    }
    window_.engine().check_interrupt();
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::nanoseconds>(2 * pause, kLongest);
  }
}

} // namespace fog::device
