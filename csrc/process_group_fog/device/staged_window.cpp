#include "device/staged_window.hpp"

#include <algorithm>
#include <cstring>
#include <thread>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "engine/engine.hpp"

namespace fog::device {
namespace {

using WorkPtr = Window::WorkPtr;
using Clock = std::chrono::steady_clock;

// How long a thread sleeps between two looks at an event: at first, and at most.
constexpr auto kShortest = std::chrono::microseconds(5);
constexpr auto kLongest = std::chrono::microseconds(500);
// Unused buffers that a window keeps: one to copy to while another one is sent.
constexpr size_t kBuffers = 2;

at::Tensor on_host(const at::Tensor& tensor) {
  const c10::InferenceMode normal(false);
  return at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU));
}

// Neither autograd nor the version counter sees it.
void copy_values(const at::Tensor& to, const at::Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView no_grad;
  to.copy_(from, true);
}

// Events that had not happened when nobody waited any longer, and the memory that the device may still use before they do.
void keep_until(const Event& event, std::vector<at::Tensor> tensors) {
  struct Kept {
    Event event;
    std::vector<at::Tensor> tensors;
  };
  static auto* mutex = new std::mutex; // the process's end needs no order
  static auto* all = new std::vector<Kept>;
  const std::lock_guard<std::mutex> lock(*mutex);
  all->erase(std::remove_if(all->begin(), all->end(), [](const Kept& kept) { return has_happened(kept.event); }), all->end());
  all->push_back({event, std::move(tensors)});
}

} // namespace

StagedWindow::StagedWindow(Recipe recipe, std::shared_ptr<HostWindow> host)
    : Window(std::move(recipe)),
      host_(std::move(host)),
      stream_(storage_.device()),
      pinned_(storage_.device(), host_->tensor().mutable_data_ptr(), bytes_) {}

std::shared_ptr<StagedWindow> StagedWindow::create(Recipe recipe, const Gather& gather) {
  auto on_cpu = recipe;
  on_cpu.tensor = on_host(recipe.tensor);
  on_cpu.tensor.copy_(recipe.tensor); // it waits
  const c10::InferenceMode normal(false);
  // What c10d's put() sends goes to the device from the engine's thread: signals come after it.
  const auto receive = [flat = recipe.tensor.detach().view({-1}), stream = Stream(recipe.tensor.device())](
                           size_t offset, const void* data, size_t bytes) {
    const auto size = static_cast<size_t>(flat.element_size());
    const auto from =
        at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(bytes / size)}, at::TensorOptions().dtype(flat.scalar_type()));
    const c10::OptionalStreamGuard guard(stream.get());
    copy_values(flat.narrow(0, static_cast<int64_t>(offset / size), from.numel()), from);
    if (const auto event = stream.record()) {
      event->synchronize();
    }
  };
  auto host = HostWindow::create(std::move(on_cpu), gather, receive);
  return std::shared_ptr<StagedWindow>(new StagedWindow(std::move(recipe), std::move(host)));
}

StagedWindow::~StagedWindow() {
  if (read_ && !is_known_to_have_happened(read_)) { // the memory is to be unlocked
    try {
      await("win_free", read_, deadline_after(timeout_));
    } catch (const std::exception&) {
    }
  }
}

WorkPtr StagedWindow::put(const at::Tensor& tensor, const Peers& destinations, const Options& options) {
  constexpr const char* op = "win_put";
  check_peers(op, "destinations", destinations, true);
  check_input(op, tensor, options.self_weight);
  auto given = options;
  given.p = p();
  return submit(
      {op,
       deadline_after(options.timeout),
       tensor,
       {},
       nullptr,
       [destinations, given](HostWindow& host, const at::Tensor& staged) { return host.put(staged, destinations, given); },
       options.self_weight != 1,
       nullptr},
      "fog:win_put");
}

WorkPtr StagedWindow::accumulate(const at::Tensor& tensor, const Peers& destinations, const Options& options) {
  constexpr const char* op = "win_accumulate";
  check_peers(op, "destinations", destinations, true);
  check_input(op, tensor, options.self_weight);
  auto given = options;
  given.p = p();
  return submit(
      {op,
       deadline_after(options.timeout),
       tensor,
       {},
       nullptr,
       [destinations, given](HostWindow& host, const at::Tensor& staged) { return host.accumulate(staged, destinations, given); },
       options.self_weight != 1,
       nullptr},
      "fog:win_accumulate");
}

WorkPtr StagedWindow::get(const Peers& sources, const Options& options) {
  check_peers("win_get", "sources", sources, false);
  return submit(
      {"win_get",
       deadline_after(options.timeout),
       {},
       {},
       nullptr,
       [sources, options](HostWindow& host, const at::Tensor&) { return host.get(sources, options); },
       false,
       nullptr},
      "fog:win_get");
}

WorkPtr StagedWindow::write(const at::Tensor& tensor, int destination, int64_t offset, const Options& options) {
  check_neighbor("put", "destination", destination, false, true);
  check_written("put", tensor, offset);
  return submit(
      {"put",
       deadline_after(options.timeout),
       tensor,
       {},
       nullptr,
       [destination, offset, options](HostWindow& host, const at::Tensor& staged) {
         return host.write(staged, destination, offset, options);
       },
       false,
       nullptr},
      "fog:put");
}

WorkPtr StagedWindow::signal(int destination, const Options& options) {
  check_neighbor("signal", "destination", destination, false, true);
  return submit(
      {"signal",
       deadline_after(options.timeout),
       {},
       {},
       nullptr,
       [destination, options](HostWindow& host, const at::Tensor&) { return host.signal(destination, options); },
       false,
       nullptr},
      "fog:signal");
}

WorkPtr StagedWindow::wait_signal(int source, const Options& options) {
  return host_->wait_signal(source, options); // what came before it is on the device
}

at::Tensor StagedWindow::map_remote(int neighbor) {
  check_neighbor("map_remote_tensor", "rank", neighbor, true, true);
  return {};
}

const char* StagedWindow::transport_to(int neighbor) const {
  return std::strcmp(host_->transport_to(neighbor), "messages") == 0 ? "staged, by messages" : "staged";
}

void StagedWindow::check(const char* op) const {
  group_->engine.check_not_forked();
  host_->check_open(op);
  TORCH_CHECK(!is_capturing(storage_.device()), "fog: ", describe(op), " cannot be captured into a graph");
}

WorkPtr StagedWindow::submit(Operation operation, const char* title) {
  check(operation.name);
  operation.work = c10::make_intrusive<WorkFog>(
      group_->engine, group_->rank, c10d::OpType::UNKNOWN, title,
      operation.tensor.defined() ? std::vector<at::Tensor>{operation.tensor} : std::vector<at::Tensor>(), std::vector<at::Tensor>());
  const auto work = operation.work;
  work->set_describe([self = self(), name = operation.name] { return self->describe(name); }); // until it is complete
  if (operation.tensor.defined()) {
    const bool whole = operation.tensor.sizes() == tensor_.sizes();
    operation.staged = whole ? take_buffer() : empty_pinned(operation.tensor.sizes(), dtype_);
    const Stream::Guard guard(stream_);
    copy_values(operation.staged, operation.tensor);
    operation.copied = stream_.record();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  if (closed_) {
    lock.unlock();
    host_->check_open(operation.name); // it is, or soon will be, closed
    fail(operation.name, "the window was freed");
  }
  if (host_->holds_mutex()) { // which other threads would wait for
    while (running_) { // until what was called before has been started
      lock.unlock();
      group_->engine.check_interrupt();
      lock.lock();
      idle_.wait_for(lock, std::chrono::milliseconds(10), [this] { return !running_; });
    }
    ++calls_;
    lock.unlock();
    start(std::move(operation));
    return work;
  }
  ++calls_;
  queue_.push_back(std::move(operation));
  if (!running_) {
    running_ = true;
    lock.unlock();
    group_->engine.run_callbacks([self = self()] { self->run_queue(); });
  }
  return work;
}

void StagedWindow::run_queue() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!queue_.empty()) {
    auto operation = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    start(std::move(operation));
    lock.lock();
  }
  running_ = false;
  idle_.notify_all();
}

void StagedWindow::start(Operation operation) {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    if (operation.copied) {
      await(operation.name, operation.copied, operation.deadline);
      operation.copied = nullptr;
    }
    future = operation.start(*host_, operation.staged)->getFuture();
  } catch (...) {
    end(operation, std::current_exception());
    return;
  }
  const auto started = std::make_shared<Operation>(std::move(operation));
  future->addCallback([self = self(), started](c10::ivalue::Future& ended) {
    self->end(*started, ended.hasError() ? ended.exception_ptr() : nullptr);
  });
}

void StagedWindow::end(const Operation& operation, std::exception_ptr error) {
  bool unused = operation.staged.defined() && !error; // after a failure somebody may still read it
  if (operation.copied) { // it may still come
    keep_until(operation.copied, {operation.tensor, operation.staged});
    unused = false;
  } else if (!error && operation.keeps_share) {
    try {
      copy_to_device(operation.name, operation.tensor, operation.staged, operation.deadline);
      count_change(operation.tensor);
      if (operation.tensor.const_data_ptr() == data_ && operation.tensor.is_contiguous()) { // neighbors get it
        const std::lock_guard<std::mutex> owner(owner_);
        await(operation.name, read_, operation.deadline);
        host_->publish(timeout_, [&] { host_->tensor().copy_(operation.staged); });
      }
    } catch (...) {
      error = std::current_exception();
      unused = false;
    }
  }
  if (unused && operation.staged.sizes() == tensor_.sizes()) {
    give_buffer(operation.staged);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --calls_;
    idle_.notify_all();
  }
  operation.work->complete(error);
  group_->engine.wake_waiters();
}

void StagedWindow::copy_to_device(const char* op, const at::Tensor& to, const at::Tensor& from, Deadline deadline) {
  Event event;
  {
    const c10::OptionalStreamGuard guard(stream_.get());
    copy_values(to, from);
    event = stream_.record();
  }
  try {
    await(op, event, deadline);
  } catch (...) {
    keep_until(event, {to, from});
    throw;
  }
}

void StagedWindow::publish(const char* op, Deadline deadline) {
  // The device may be busy with other things for long: nobody who gets the copy is to wait for these.
  await(op, record_on(*current_stream(storage_.device())), deadline);
  host_->publish(timeout_, [&] {
    const c10::OptionalStreamGuard guard(stream_.get());
    copy_values(host_->tensor(), tensor_);
    read_ = stream_.record(); // and written: if this fails nobody changes the copy before
    await(op, read_, deadline);
  });
}

at::Tensor StagedWindow::update(double self_weight, const Peers& neighbors, bool reset, bool clone, const Options& options) {
  constexpr const char* op = "win_update";
  check(op);
  check_peers(op, "neighbors", neighbors, false);
  check_self_weight(op, self_weight);
  check_tensor_in_place(op);
  const auto deadline = deadline_after(options.timeout);
  std::unique_ptr<Hold> held; // before `owner_`: whoever holds it publishes at its end
  if (options.mutex && !neighbors.empty()) {
    std::vector<int> ranks;
    for (const auto& [rank, weight] : neighbors) {
      ranks.push_back(rank);
    }
    held = host_->hold(std::move(ranks), true, options.timeout);
  }
  auto others = options;
  others.mutex = false;
  const std::lock_guard<std::mutex> owner(owner_);
  await(op, read_, deadline);
  if (self_weight != 0) {
    publish(op, deadline);
  }
  const auto combined = host_->update(self_weight, neighbors, reset, clone, others);
  at::Tensor result = tensor_;
  if (clone) {
    const c10::InferenceMode normal(false);
    result = at::empty(tensor_.sizes(), tensor_.options().requires_grad(false));
    result.copy_(combined); // from memory of this call's own: it waits
    return result;
  }
  copy_values(result, combined);
  count_change(result);
  read_ = record_on(*current_stream(storage_.device()));
  return result;
}

int64_t StagedWindow::version(int neighbor) {
  return host_->version(neighbor);
}

double StagedWindow::p() {
  return host_->p();
}

void StagedWindow::set_p(double p) {
  host_->set_p(p);
}

void StagedWindow::lock(const std::vector<int>& ranks, bool own, Milliseconds timeout) {
  host_->lock(ranks, own, timeout);
}

void StagedWindow::unlock(const std::vector<int>& ranks, bool own) {
  std::exception_ptr error;
  if (own && host_->holds_mutex() && host_->is_open() && is_tensor_in_place()) {
    try {
      const std::lock_guard<std::mutex> owner(owner_);
      const auto deadline = deadline_after(timeout_);
      await("win_mutex", read_, deadline);
      publish("win_mutex", deadline);
    } catch (...) { // the mutexes are free all the same
      error = std::current_exception();
    }
  }
  host_->unlock(ranks, own);
  if (error) {
    std::rethrow_exception(error);
  }
}

void StagedWindow::free(Milliseconds timeout) {
  auto& engine = group_->engine;
  engine.check_not_forked();
  const auto deadline = deadline_after(timeout);
  {
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    while (calls_ > 0) {
      if (Clock::now() >= deadline) {
        const auto left = calls_;
        lock.unlock();
        fail(
            "win_free",
            c10::str("timed out: its timeout of ", timeout.count(), " ms is over; operations of this rank in flight: ", left));
      }
      lock.unlock();
      engine.check_interrupt();
      lock.lock();
      idle_.wait_for(lock, std::chrono::milliseconds(10), [this] { return calls_ == 0; });
    }
  }
  {
    const std::lock_guard<std::mutex> owner(owner_);
    await("win_free", read_, deadline);
  }
  host_->free(std::max(Milliseconds(1), std::chrono::ceil<Milliseconds>(deadline - Clock::now())));
}

void StagedWindow::await(const char* op, const Event& event, Deadline deadline) const {
  std::chrono::nanoseconds pause = kShortest;
  while (!has_happened(event)) {
    if (Clock::now() >= deadline) {
      fail(op, c10::str("timed out waiting for ", storage_.device(), " to do what it was given before"));
    }
    group_->engine.check_interrupt();
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::nanoseconds>(2 * pause, kLongest);
  }
}

at::Tensor StagedWindow::take_buffer() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!buffers_.empty()) {
      auto buffer = std::move(buffers_.back());
      buffers_.pop_back();
      return buffer;
    }
  }
  const c10::InferenceMode normal(false);
  return empty_pinned(tensor_.sizes(), dtype_);
}

void StagedWindow::give_buffer(at::Tensor buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (buffers_.size() < kBuffers) {
    buffers_.push_back(std::move(buffer));
  }
}

} // namespace fog::device
