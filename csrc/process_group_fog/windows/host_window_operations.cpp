// What a window of CPU tensors does: put, accumulate, get, update.
#include <algorithm>
#include <cmath>
#include <cstring>

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "core/linear_combination.hpp"
#include "transport/futex.hpp"
#include "core/tensor_lists.hpp"
#include "transport/shared_memory/shared_tensors.hpp"
#include "windows/host_window_mutexes.hpp"
#include "windows/host_window_parts.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;
using WorkPtr = Window::WorkPtr;

// How long an owner that wants to change its tensor waits for one that reads it.
constexpr auto kGrace = std::chrono::milliseconds(100);
// Copies of a neighbor's tensor that its update() may spoil before it is asked to wait.
constexpr int kTries = 2;

const char* name_of(WindowOp op) {
  switch (op) {
    case WindowOp::kPut:
      return "win_put";
    case WindowOp::kAccumulate:
      return "win_accumulate";
    case WindowOp::kGet:
      return "win_get";
    case WindowOp::kWrite:
      return "put";
    case WindowOp::kSignal:
      return "signal";
    case WindowOp::kLock:
    case WindowOp::kUnlock:
      return "win_mutex";
    case WindowOp::kLeave:
      break;
  }
  return "win_free";
}

const char* title_of(WindowOp op) {
  switch (op) {
    case WindowOp::kPut:
      return "fog:win_put";
    case WindowOp::kAccumulate:
      return "fog:win_accumulate";
    case WindowOp::kGet:
      return "fog:win_get";
    case WindowOp::kWrite:
      return "fog:put";
    default:
      return "fog:signal";
  }
}

} // namespace

WorkPtr HostWindow::put(const at::Tensor& tensor, const Peers& destinations, const Options& options) {
  return start(WindowOp::kPut, tensor, destinations, options);
}

WorkPtr HostWindow::accumulate(const at::Tensor& tensor, const Peers& destinations, const Options& options) {
  return start(WindowOp::kAccumulate, tensor, destinations, options);
}

WorkPtr HostWindow::get(const Peers& sources, const Options& options) {
  return start(WindowOp::kGet, at::Tensor(), sources, options);
}

WorkPtr HostWindow::start(WindowOp op, const at::Tensor& tensor, const Peers& peers, const Options& options) {
  const char* name = name_of(op);
  const bool out = op != WindowOp::kGet;
  check_open(name);
  check_peers(name, out ? "destinations" : "sources", peers, out);
  at::Tensor data;
  if (out) {
    check_input(name, tensor, options.self_weight);
    data = tensor.is_contiguous() ? tensor : flatten({tensor});
  }
  const auto call = begin(op, out ? std::vector<at::Tensor>{tensor} : std::vector<at::Tensor>());
  for (const auto& peer : peers) { // before anything is sent: all get their shares, or nobody
    const auto& other = neighbor(name, "", peer.first, !out, out);
    if (other.gone && !options.skip_lost) {
      call->finish(failure(name, why_gone(other)));
      return call->work;
    }
  }
  const double p = options.p.value_or(this->p());
  const auto deadline = deadline_after(options.timeout);
  if (out && options.self_weight != 1) {
    call->then([this, name, tensor, data, p, options, deadline] {
      keep(name, tensor, data, p, options, deadline);
    }); // the call keeps the window
  }
  for (const auto& [rank, weight] : peers) {
    call->expect();
    auto& peer = neighbor(name, "", rank, !out, out);
    dispatch(
        {op, &peer, weight, options.with_p && out ? std::make_optional(weight * p) : std::nullopt, 0, options.mutex, data,
         options.timeout, deadline, call},
        options.skip_lost);
  }
  call->finish(nullptr);
  return call->work;
}

std::shared_ptr<HostWindow::Call> HostWindow::begin(WindowOp op, const std::vector<at::Tensor>& inputs) {
  auto work = c10::make_intrusive<WorkFog>(
      group_->engine, group_->rank, c10d::OpType::UNKNOWN, title_of(op), inputs, std::vector<at::Tensor>());
  work->set_describe([self = self(), op] { return self->describe(name_of(op)); }); // until it is complete
  auto call = std::make_shared<Call>(self(), std::move(work));
  begin_call(name_of(op), For::kThisRank);
  return call;
}

void HostWindow::dispatch(Part part, bool skip_lost) {
  auto& peer = *part.neighbor;
  const auto op = part.op;
  const auto call = part.call;
  std::exception_ptr error;
  try {
    if (peer.gone) {
      if (!skip_lost) {
        fail(name_of(part.op), why_gone(peer));
      }
    } else if (!peer.view || (receiver_ && (part.op == WindowOp::kWrite || part.op == WindowOp::kSignal))) {
      send(std::move(part));
      return; // its end finishes the part
    } else {
      std::unique_lock<std::mutex> lock(peer.queue_mutex);
      const bool first = !peer.running;
      const bool locked = first && part.mutex && peer.mutex_there->try_lock();
      if (!first || (part.mutex && !locked)) {
        peer.queue.push_back(std::move(part));
        if (first) {
          try {
            group_->engine.run_callbacks([self = self(), &peer] { self->run_queue(peer); }, Engine::Refused::kThrow);
          } catch (const std::exception& refusal) {
            peer.queue.pop_back(); // nobody else is at it
            refused(name_of(op), refusal);
          }
          peer.running = true;
        }
        lock.unlock();
        if (peer.mutex_there->held_here()) { // then nobody else can get at what waits for it
          while (run_first(peer, true, nullptr, nullptr)) {
          }
        }
        return;
      }
      lock.unlock();
      try {
        execute(part);
      } catch (...) {
        error = std::current_exception();
      }
      if (locked) {
        peer.mutex_there->unlock();
      }
    }
  } catch (...) {
    error = std::current_exception();
  }
  call->finish(error);
}

void HostWindow::refused(const char* op, const std::exception& refusal) const {
  fail(op, c10::str("it has to wait, and the system refuses a thread for that: ", message_of(refusal)));
}

void HostWindow::run_queue(Neighbor& peer) {
  while (true) {
    std::unique_lock<std::mutex> lock(peer.queue_mutex);
    if (peer.queue.empty()) {
      peer.running = false;
      return;
    }
    const bool mutex = peer.queue.front().mutex;
    const auto deadline = peer.queue.front().deadline;
    const auto call = peer.queue.front().call;
    lock.unlock();
    std::exception_ptr error;
    bool locked = false;
    if (mutex) {
      try {
        peer.mutex_there->lock(deadline);
        locked = true;
      } catch (...) {
        error = std::current_exception();
      }
    }
    run_first(peer, locked, error ? call.get() : nullptr, error);
    if (locked) {
      peer.mutex_there->unlock();
    }
  }
}

bool HostWindow::run_first(Neighbor& peer, bool locked, const Call* failed, std::exception_ptr error) {
  std::unique_lock<std::mutex> turn(peer.turn);
  std::unique_lock<std::mutex> lock(peer.queue_mutex);
  if (peer.queue.empty()) {
    return false;
  }
  const auto& first = peer.queue.front();
  if (error ? first.call.get() != failed : first.mutex && !locked) { // another thread has run the one that was there
    return false;
  }
  const auto part = std::move(peer.queue.front());
  peer.queue.pop_front();
  lock.unlock();
  if (!error) {
    try {
      execute(part);
    } catch (...) {
      error = std::current_exception();
    }
  }
  lock.lock();
  const bool last = peer.queue.empty();
  lock.unlock();
  turn.unlock();
  part.call->finish(error);
  return !last;
}

void HostWindow::send(Part part) {
  auto request = std::make_shared<WindowRequest>();
  request->group = group_;
  request->window = number_;
  request->peer = part.neighbor->rank;
  request->op = part.op;
  request->weight = part.weight;
  request->p = part.p;
  request->offset = part.offset;
  request->mutex = part.mutex;
  request->data = part.data;
  request->what = c10::str(describe(name_of(part.op)), part.op == WindowOp::kGet ? " from" : " to", " rank ", part.neighbor->rank);
  if (part.op == WindowOp::kGet) {
    request->reply_bytes = bytes_;
    request->take = [self = self(), &peer = *part.neighbor, weight = part.weight](const void* data) {
      const std::lock_guard<std::mutex> owner(self->owner_);
      auto& place = self->memory_->slot(peer.slot);
      if (!self->memory_->provide_owners_buffers(place)) {
        self->fail("win_get", c10::str("no memory for buffers of ", self->bytes_, " bytes"));
      }
      const unsigned buffer = place.slot.owners_buffer();
      self->scale(self->memory_->buffer(place, buffer), data, weight);
      place.slot.replace(buffer);
    };
  }
  request->done = [call = part.call](const std::exception_ptr& error) { call->finish(error); };
  WindowService::of(*group_).request(request, part.timeout);
}

void HostWindow::execute(const Part& part) {
  auto& peer = *part.neighbor;
  if (part.op == WindowOp::kGet) {
    fetch(peer, part.weight, part.deadline);
    return;
  }
  if (part.op == WindowOp::kWrite) {
    std::memcpy(peer.view->tensor() + part.offset, part.data.const_data_ptr(), part.data.nbytes());
    return;
  }
  if (part.op == WindowOp::kSignal) {
    auto& signals = peer.view->door(peer.door_there).signals;
    signals.fetch_add(1, std::memory_order_release);
    futex_wake(signals);
    return;
  }
  const std::lock_guard<std::mutex> writing(peer.writing);
  write_slot(*peer.view, peer.slot_there, part.op, part.weight, part.p, part.data.const_data_ptr());
}

void HostWindow::write_slot(
    const WindowView& view, size_t slot, WindowOp op, double weight, std::optional<double> p, const void* data) {
  auto& place = view.slot(slot);
  if (op == WindowOp::kPut) {
    const bool read = place.slot.may_have_been_read();
    const unsigned buffer = place.slot.writers_buffer();
    scale(view.buffer(place, buffer), data, weight, read);
    place.slot.put(buffer, p);
    return;
  }
  // Again if the owner has taken what this added to: then the slot is empty, and nobody but this writer fills it.
  while (true) {
    const auto base = place.slot.base();
    const unsigned buffer = place.slot.writers_buffer();
    auto* out = view.buffer(place, buffer);
    const void* sum = base.empty ? nullptr : view.buffer(place, base.buffer);
    if (base.empty) {
      scale(out, data, weight, true); // the owner has taken what was there
    } else if (weight == 0) {
      scale(out, sum, 1.0);
    } else {
      linear_combination(dtype_, out, {sum, data}, {1.0, weight}, static_cast<size_t>(numel_));
    }
    if (place.slot.add(buffer, base.p + p.value_or(0.0), base)) {
      return;
    }
  }
}

void HostWindow::fetch(Neighbor& source, double weight, Deadline deadline) {
  const std::lock_guard<std::mutex> owner(owner_);
  auto& place = memory_->slot(source.slot);
  if (!memory_->provide_owners_buffers(place)) {
    fail("win_get", c10::str("no memory for buffers of ", bytes_, " bytes"));
  }
  const unsigned buffer = place.slot.owners_buffer();
  auto* out = memory_->buffer(place, buffer);
  const auto copy = [&] { scale(out, source.view->tensor(), weight); };
  auto& changes = source.view->label().changes;
  bool whole = false;
  for (int tries = 0; tries < kTries && !whole; ++tries) {
    const auto before = changes.load(std::memory_order_acquire);
    if (before % 2 != 0) {
      break; // under way: rather wait for its end
    }
    copy();
    std::atomic_thread_fence(std::memory_order_acquire); // pairs with that in change_tensor()
    whole = changes.load(std::memory_order_relaxed) == before;
  }
  auto& mutex = source.view->door(source.door_there).tensor;
  while (!whole) {
    if (Clock::now() >= deadline || !acquire(mutex, PairMutex::Side::kSecond, source, deadline)) {
      fail("win_get", c10::str("timed out waiting for rank ", source.rank, " to end its update"));
    }
    const auto before = changes.load(std::memory_order_acquire);
    copy();
    std::atomic_thread_fence(std::memory_order_acquire);
    // The owner does not wait for ever: see change_tensor(). One that died within an update leaves what there is.
    whole = source.ended || (before % 2 == 0 && changes.load(std::memory_order_relaxed) == before);
    mutex.unlock(PairMutex::Side::kSecond);
  }
  place.slot.replace(buffer);
}

void HostWindow::keep(
    const char* op, const at::Tensor& tensor, const at::Tensor& data, double p, const Options& options, Deadline deadline) {
  const auto shrink = [&] {
    auto* values = data.mutable_data_ptr();
    scale(values, values, options.self_weight);
    if (!data.is_same(tensor)) {
      copy_tensor(tensor, data.view(tensor.sizes()));
    }
    count_change(tensor);
    if (options.with_p) { // of what was sent: more may have been collected since
      const std::lock_guard<std::mutex> lock(p_mutex_);
      p_ = p_ == p ? options.self_weight * p : p_ - (1.0 - options.self_weight) * p;
    }
  };
  if (tensor.storage().is_alias_of(storage_)) { // neighbors may be reading it
    const std::lock_guard<std::mutex> owner(owner_);
    change_tensor(deadline, shrink);
  } else {
    shrink();
  }
}

void HostWindow::publish(Milliseconds timeout, const std::function<void()>& change) {
  const Use use(*this, "win_update", For::kThisRank);
  const std::lock_guard<std::mutex> owner(owner_);
  change_tensor(deadline_after(timeout), change);
}

void HostWindow::change_tensor(Deadline deadline, const std::function<void()>& change) {
  struct Held {
    std::vector<PairMutex*> mutexes;
    ~Held() {
      for (auto* mutex : mutexes) {
        mutex->unlock(PairMutex::Side::kFirst);
      }
    }
  } held;
  for (const auto& neighbor : neighbors_) {
    if (neighbor->out) {
      auto& mutex = memory_->door(neighbor->door).tensor;
      if (!acquire(mutex, PairMutex::Side::kFirst, *neighbor, std::min(deadline, Clock::now() + kGrace))) {
        mutex.seize(PairMutex::Side::kFirst); // a reader that was stopped: it sees afterwards that it has to read again
      }
      held.mutexes.push_back(&mutex);
    }
  }
  auto& changes = memory_->label().changes;
  changes.fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst); // before what follows; pairs with those in fetch()
  change();
  changes.fetch_add(1, std::memory_order_release);
}

void HostWindow::scale(void* out, const void* data, double weight, bool others_read) const {
  const auto numel = static_cast<size_t>(numel_);
  if (weight == 0) {
    linear_combination(dtype_, out, {}, {}, numel);
  } else {
    linear_combination(dtype_, out, data, weight, numel, others_read);
  }
}

at::Tensor HostWindow::update(double self_weight, const Peers& neighbors, bool reset, bool clone, const Options& options) {
  constexpr const char* op = "win_update";
  const Use use(*this, op, For::kThisRank);
  check_peers(op, "neighbors", neighbors, false);
  check_self_weight(op, self_weight);
  check_tensor_in_place(op);
  const auto deadline = deadline_after(options.timeout);
  std::vector<int> locked;
  for (const auto& peer : neighbors) {
    if (options.mutex) {
      locked.push_back(peer.first);
    }
  }
  lock(locked, true, options.timeout);
  struct Unlock {
    HostWindow& window;
    const std::vector<int>& ranks;
    ~Unlock() {
      window.unlock(ranks, true);
    }
  } unlock_at_end{*this, locked};

  const std::lock_guard<std::mutex> owner(owner_);
  at::Tensor result = tensor_;
  if (clone) {
    const c10::InferenceMode normal(false);
    result = at::empty(tensor_.sizes(), tensor_.options().requires_grad(false));
  }
  const auto combine = [&] {
    std::vector<const void*> inputs;
    std::vector<double> weights;
    std::vector<Slot*> pinned;
    if (self_weight != 0) {
      inputs.push_back(tensor_.const_data_ptr());
      weights.push_back(self_weight);
    }
    double p = 0;
    for (const auto& [rank, weight] : neighbors) {
      auto& place = memory_->slot(neighbor(op, "neighbors", rank, true, false).slot);
      const auto view = place.slot.pin(reset, options.with_p);
      pinned.push_back(&place.slot);
      p += weight * view.p;
      if (!view.empty && weight != 0) {
        inputs.push_back(memory_->buffer(place, view.buffer));
        weights.push_back(weight);
      }
    }
    linear_combination(dtype_, result.mutable_data_ptr(), inputs, weights, static_cast<size_t>(numel_));
    if (!clone) {
      count_change(tensor_);
    }
    for (auto* slot : pinned) {
      slot->unpin();
    }
    if (options.with_p) {
      const std::lock_guard<std::mutex> lock(p_mutex_);
      p_ = self_weight * p_ + p;
    }
    for (size_t i = 0; i < in_neighbors_.size(); ++i) { // those pinned count from then on: more may have come since
      auto& slot = memory_->slot(i).slot;
      if (std::find(pinned.begin(), pinned.end(), &slot) == pinned.end()) {
        slot.reset_version();
      }
    }
  };
  if (clone) {
    combine();
  } else {
    change_tensor(deadline, combine);
  }
  return result;
}

int64_t HostWindow::version(int rank) {
  constexpr const char* op = "get_win_version";
  const Use use(*this, op, For::kThisRank);
  return memory_->slot(neighbor(op, "rank", rank, true, false).slot).slot.version();
}

double HostWindow::p() {
  const std::lock_guard<std::mutex> lock(p_mutex_);
  return p_;
}

void HostWindow::set_p(double p) {
  const std::lock_guard<std::mutex> lock(p_mutex_);
  p_ = p;
}

WorkPtr HostWindow::write(const at::Tensor& tensor, int destination, int64_t offset, const Options& options) {
  const char* op = name_of(WindowOp::kWrite);
  auto& peer = neighbor(op, "destination", destination, false, true);
  check_written(op, tensor, offset);
  const auto call = begin(WindowOp::kWrite, {tensor});
  call->expect();
  dispatch(
      {WindowOp::kWrite, &peer, 1.0, std::nullopt, static_cast<size_t>(offset) * c10::elementSize(dtype_), false,
       tensor.is_contiguous() ? tensor : flatten({tensor}), options.timeout, deadline_after(options.timeout), call},
      false);
  call->finish(nullptr);
  return call->work;
}

WorkPtr HostWindow::signal(int destination, const Options& options) {
  auto& peer = neighbor("signal", "destination", destination, false, true);
  const auto call = begin(WindowOp::kSignal, {});
  call->expect();
  dispatch(
      {WindowOp::kSignal, &peer, 1.0, std::nullopt, 0, false, at::Tensor(), options.timeout, deadline_after(options.timeout), call},
      false);
  call->finish(nullptr);
  return call->work;
}

WorkPtr HostWindow::wait_signal(int source, const Options& options) {
  const auto& peer = neighbor("wait_signal", "source", source, true, false);
  const auto call = begin(WindowOp::kSignal, {});
  const auto wait = [this, call, &peer, deadline = deadline_after(options.timeout)] {
    std::exception_ptr error;
    try {
      if (!take_signal(peer, deadline)) {
        fail("wait_signal", c10::str("timed out waiting for a signal of rank ", peer.rank));
      }
    } catch (...) {
      error = std::current_exception();
    }
    call->finish(error);
  };
  if (memory_->door(peer.door).signals.load(std::memory_order_acquire) > 0) {
    wait();
  } else {
    try {
      group_->engine.run_callbacks(wait, Engine::Refused::kThrow); // the call keeps the window
    } catch (const std::exception& refusal) {
      try {
        refused("wait_signal", refusal);
      } catch (...) {
        call->finish(std::current_exception());
      }
    }
  }
  return call->work;
}

bool HostWindow::take_signal(const Neighbor& source, Deadline deadline) {
  auto& signals = memory_->door(source.door).signals;
  while (true) {
    const bool gone = source.gone; // before the signals: it may have given one and gone
    auto count = signals.load(std::memory_order_acquire);
    while (count > 0) {
      if (signals.compare_exchange_weak(count, count - 1, std::memory_order_acquire)) {
        return true;
      }
    }
    check_abandoned("wait_signal");
    if (gone) {
      fail("wait_signal", why_gone(source));
    }
    const auto left = deadline - Clock::now();
    if (left.count() <= 0) {
      return false;
    }
    futex_wait(signals, 0, std::min<std::chrono::nanoseconds>(kLook, left));
  }
}

at::Tensor HostWindow::map_remote(int rank) {
  const auto& peer = neighbor("map_remote_tensor", "rank", rank, true, true);
  if (!peer.view) {
    return {};
  }
  return at::from_blob(peer.view->tensor(), tensor_.sizes(), [self = self()](void*) {}, tensor_.options().requires_grad(false));
}

void HostWindow::apply(int source, WindowOp op, double weight, std::optional<double> p, const void* data, size_t bytes) {
  const char* name = name_of(op);
  const Use use(*this, name, For::kNeighbor);
  TORCH_CHECK_VALUE(bytes == bytes_, name, ": got ", bytes, " bytes; window '", name_, "' has ", bytes_);
  auto& peer = neighbor(name, "source", source, true, false);
  const std::lock_guard<std::mutex> writing(peer.writing);
  write_slot(*memory_, peer.slot, op, weight, p, data);
}

void HostWindow::write(int source, size_t offset, const void* data, size_t bytes) {
  const Use use(*this, "put", For::kNeighbor);
  TORCH_CHECK_VALUE(
      offset <= bytes_ && bytes <= bytes_ - offset, "put: got ", bytes, " bytes from byte ", offset, " on; window '", name_, "' has ",
      bytes_);
  if (receiver_) {
    receiver_(offset, data, bytes);
  } else {
    std::memcpy(memory_->tensor() + offset, data, bytes);
  }
}

void HostWindow::read(void* out) {
  const Use use(*this, "win_get", For::kNeighbor);
  const std::lock_guard<std::mutex> owner(owner_);
  std::memcpy(out, memory_->tensor(), bytes_);
}

} // namespace fog
