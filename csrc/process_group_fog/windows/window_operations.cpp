// The operations of a Window: put, accumulate, get, update, and c10d's write and signals.
#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "core/arithmetic.hpp"
#include "core/tensor_lists.hpp"
#include "transport/futex.hpp"
#include "transport/shared_memory/shared_tensors.hpp"
#include "windows/window_legs.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;
using WorkPtr = Window::WorkPtr;

// How long an owner that wants to change its tensor waits for a reader.
constexpr auto kReaderTimeout = std::chrono::milliseconds(100);

// For profilers, by WindowOp.
constexpr const char* kTitles[] = {"fog:Window.put", "fog:Window.accumulate", "fog:Window.get",   "fog:put",
                                   "fog:signal",     "fog:Window.mutex",      "fog:Window.mutex", "fog:Window.free"};

const char* title_of(WindowOp op) {
  return kTitles[static_cast<size_t>(op)];
}

} // namespace

const char* name_of(WindowOp op) {
  return title_of(op) + std::strlen("fog:");
}

// --- calls ---

void Window::Call::finish(const std::exception_ptr& error) {
  if (error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) {
      error_ = error;
    }
  }
  if (pending_.fetch_sub(1) != 1) {
    return;
  }
  if (then_ && !error_) {
    try {
      then_();
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  window_->end_call();
  slice_.end(name_of(op), window_->group_->name, window_->name(), error_ != nullptr);
  work->complete(error_);
}

void Window::Call::observe(const Peers& peers, size_t bytes) {
  auto& group = window_->group_;
  group->engine.with_lock([&] {
    for (const auto& [rank, weight] : peers) {
      auto& traffic = group->traffic[rank];
      ++(op == WindowOp::kGet ? traffic.received_messages : traffic.sent_messages);
      (op == WindowOp::kGet ? traffic.received_bytes : traffic.sent_bytes) += bytes;
    }
  });
  for (const auto& [rank, weight] : peers) {
    slice_.add(rank, bytes);
  }
}

void Window::Call::finish_from_engine(const std::shared_ptr<Call>& call, const std::exception_ptr& error) {
  if (call->waits_) {
    call->window_->group_->engine.run_callbacks([call, error] { call->finish(error); });
  } else {
    call->finish(error);
  }
}

WorkPtr Window::put(const at::Tensor& tensor, const Peers& destinations, const Options& options) {
  return start(WindowOp::kPut, tensor, destinations, options);
}

WorkPtr Window::accumulate(const at::Tensor& tensor, const Peers& destinations, const Options& options) {
  return start(WindowOp::kAccumulate, tensor, destinations, options);
}

WorkPtr Window::get(const Peers& sources, const Options& options) {
  return start(WindowOp::kGet, at::Tensor(), sources, options);
}

WorkPtr Window::write(const at::Tensor& tensor, int destination, int64_t offset, const Options& options) {
  neighbor("put", "destination", destination, false, true);
  check_written("put", tensor, offset);
  return start(WindowOp::kWrite, tensor, {{destination, 1.0}}, options, static_cast<size_t>(offset) * c10::elementSize(values_.dtype));
}

WorkPtr Window::signal(int destination, const Options& options) {
  neighbor("signal", "destination", destination, false, true);
  return start(WindowOp::kSignal, at::Tensor(), {{destination, 1.0}}, options);
}

WorkPtr Window::start(WindowOp op, const at::Tensor& tensor, const Peers& peers, const Options& options, size_t offset) {
  const char* name = name_of(op);
  const bool shares = op == WindowOp::kPut || op == WindowOp::kAccumulate;
  check_open(name);
  if (shares || op == WindowOp::kGet) {
    check_peers(name, shares ? "destinations" : "sources", peers, shares);
  }
  if (shares) {
    check_input(name, tensor, options.self_weight);
  }
  if (staging_) {
    staging_->check(name);
  }
  const auto call = begin(op, tensor, options.timeout);
  const double p = shares ? this->p() : 0.0;
  try {
    if (staging_) {
      const auto go = [this, call, peers, options, p, offset](const at::Tensor& staged) {
        launch(call, staged, peers, options, p, offset);
      };
      staging_->submit(name, tensor, call->deadline, go, [call](const std::exception_ptr& error) { call->finish(error); });
    } else {
      launch(call, !tensor.defined() || tensor.is_contiguous() ? tensor : flatten({tensor}), peers, options, p, offset);
    }
  } catch (...) {
    call->finish(std::current_exception());
    throw;
  }
  return call->work;
}

std::shared_ptr<Window::Call> Window::begin(WindowOp op, const at::Tensor& tensor, Milliseconds timeout) {
  const auto inputs = tensor.defined() ? std::vector<at::Tensor>{tensor} : std::vector<at::Tensor>();
  auto work = c10::make_intrusive<WorkFog>(
      group_->engine, group_->rank, c10d::OpType::UNKNOWN, title_of(op), inputs, std::vector<at::Tensor>());
  // valid until the Work is complete
  work->set_describe([self = shared_from_this(), op] { return self->describe(name_of(op)); });
  auto call = std::make_shared<Call>(shared_from_this(), op, tensor, deadline_after(timeout), std::move(work));
  begin_call(name_of(op), For::kThisRank);
  return call;
}

void Window::launch(
    const std::shared_ptr<Call>& call, const at::Tensor& data, const Peers& peers, const Options& options, double p, size_t offset) {
  const auto op = call->op;
  const char* name = name_of(op);
  const bool out = op != WindowOp::kGet;
  for (const auto& peer : peers) { // before anything is sent: either all ranks get their shares, or none
    const auto& other = neighbor(name, "", peer.first, !out, out);
    if (other.gone && !options.skip_lost) {
      call->finish(failure(name, why_gone(other)));
      return;
    }
  }
  const bool shares = op == WindowOp::kPut || op == WindowOp::kAccumulate;
  const bool keeps = shares && options.self_weight != 1;
  if (keeps || (staging_ && data.defined())) {
    const auto then = [this, call = call.get(), data, p, options, keeps] { // the call keeps the window alive
      if (keeps) {
        keep(*call, data, p, options);
      }
      if (staging_) {
        staging_->finish(name_of(call->op), call->tensor, data, keeps, call->deadline);
      }
    };
    call->then(then, staging_ && keeps);
  }
  if (group_->engine.observed()) {
    call->observe(peers, op == WindowOp::kGet ? bytes() : data.defined() ? data.nbytes() : 0);
  }
  for (const auto& [rank, weight] : peers) {
    const auto sent_p = options.with_p && shares ? std::make_optional(weight * p) : std::nullopt;
    call->expect();
    dispatch(
        neighbor(name, "", rank, !out, out),
        {op, weight, sent_p, offset, options.mutex, data, options.timeout, call->deadline, call, options.waits}, options.skip_lost);
  }
  call->finish(nullptr);
}

void Window::dispatch(Neighbor& peer, Part part, bool skip_lost) {
  const auto call = part.call;
  std::exception_ptr error;
  try {
    if (!peer.gone) {
      const bool raw = part.op == WindowOp::kWrite || part.op == WindowOp::kSignal;
      (raw && peer.raw_leg ? peer.raw_leg : peer.leg)->start(std::move(part));
      return; // the leg finishes the part
    }
    if (!skip_lost) {
      fail(name_of(part.op), why_gone(peer));
    }
  } catch (...) {
    error = std::current_exception();
  }
  call->finish(error);
}

void Window::keep(const Call& call, const at::Tensor& data, double p, const Options& options) {
  const auto& tensor = call.tensor;
  const auto shrink = [&] {
    auto* values = data.mutable_data_ptr();
    values_.scale(values, values, options.self_weight);
    if (!staging_) {
      if (!data.is_same(tensor)) {
        copy_tensor(tensor, data.view(tensor.sizes()));
      }
      count_change(tensor);
    }
    if (options.with_p) { // multiply only the p that was sent: more may have been collected since
      const std::lock_guard<std::mutex> lock(p_mutex_);
      p_ = p_ == p ? options.self_weight * p : p_ - (1.0 - options.self_weight) * p;
    }
  };
  if (!staging_ && tensor.storage().is_alias_of(storage_)) { // neighbors may be reading it
    const std::lock_guard<std::mutex> owner(owner_);
    change_tensor(call.deadline, shrink);
  } else {
    shrink();
  }
}

// --- the owner ---

bool Window::replace_slot(const Neighbor& source, const std::function<bool(void* out)>& copy) {
  const std::lock_guard<std::mutex> owner(owner_);
  auto& place = memory_->slot(source.slot);
  if (!memory_->provide_owners_buffers(place)) {
    fail("Window.get", c10::str("no memory for buffers of ", values_.bytes, " bytes"));
  }
  if (source.mailbox) {
    source.mailbox->absorb(); // the new value replaces earlier puts
  }
  const unsigned buffer = place.slot.owners_buffer();
  if (!copy(memory_->buffer(place, buffer))) {
    return false;
  }
  place.slot.replace(buffer);
  return true;
}

void Window::publish(const std::function<void()>& change) {
  const std::lock_guard<std::mutex> owner(owner_);
  change_tensor(deadline_after(timeout_), change);
}

void Window::change_tensor(Deadline deadline, const std::function<void()>& change) {
  // Ends the change and unlocks the mutexes, also if the change throws: readers wait while the counter is odd.
  struct Held {
    std::atomic<uint64_t>& changes;
    std::vector<PairMutex*> mutexes;
    bool changing = false;
    ~Held() {
      if (changing) {
        changes.fetch_add(1, std::memory_order_release);
      }
      for (auto* mutex : mutexes) {
        mutex->unlock(PairMutex::Side::kFirst);
      }
    }
  } held{memory_->label().changes, {}};
  for (const auto& neighbor : neighbors_) {
    if (neighbor->out) {
      auto& mutex = memory_->control(neighbor->control).tensor;
      if (!acquire(mutex, PairMutex::Side::kFirst, *neighbor, std::min(deadline, Clock::now() + kReaderTimeout))) {
        mutex.seize(PairMutex::Side::kFirst); // a stopped reader notices afterwards that it has to read again
      }
      held.mutexes.push_back(&mutex);
    }
  }
  held.changes.fetch_add(1, std::memory_order_relaxed);
  held.changing = true;
  // before the changes; pairs with the fences in MappedLeg::fetch()
  std::atomic_thread_fence(std::memory_order_seq_cst);
  change();
}

void Window::count_change(const at::Tensor& tensor) {
  if (!tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version(); // for autograd, which may have saved the tensor for a backward pass
  }
}

at::Tensor Window::update(double self_weight, const Peers& neighbors, bool reset, bool clone, const Options& options) {
  constexpr const char* op = "Window.update";
  WindowSlice slice;
  const Use use(*this, op, For::kThisRank);
  if (staging_) {
    staging_->check(op);
  }
  check_peers(op, "neighbors", neighbors, false);
  check_self_weight(op, self_weight);
  check_tensor_in_place(op);
  const auto deadline = deadline_after(options.timeout);
  std::unique_ptr<Hold> locked;
  if (options.mutex) {
    std::vector<int> ranks;
    for (const auto& peer : neighbors) {
      ranks.push_back(peer.first);
    }
    locked = hold(std::move(ranks), true, options.timeout, false); // the update itself publishes the tensor
  }
  const auto combined = [&] { return combine(self_weight, neighbors, reset, clone, options.with_p, deadline); };
  auto result = staging_ ? staging_->update(op, self_weight != 0, clone, combined, deadline) : combined();
  for (const auto& neighbor : neighbors) {
    slice.add(neighbor.first, bytes());
  }
  slice.end(op, group_->name, name(), false);
  return result;
}

at::Tensor Window::combine(double self_weight, const Peers& neighbors, bool reset, bool clone, bool with_p, Deadline deadline) {
  const std::lock_guard<std::mutex> owner(owner_);
  for (const auto& neighbor : neighbors_) { // also for neighbors that are not summed: their versions restart too
    if (neighbor->mailbox) {
      neighbor->mailbox->absorb();
    }
  }
  at::Tensor result = host_;
  if (clone) {
    const c10::InferenceMode normal(false);
    result = at::empty(host_.sizes(), host_.options().requires_grad(false));
  }
  const auto sum = [&] {
    std::vector<const void*> inputs;
    std::vector<double> weights;
    std::vector<Slot*> pinned;
    inputs.reserve(neighbors.size() + 1); // so that no value is taken and then lost for lack of memory
    weights.reserve(neighbors.size() + 1);
    pinned.reserve(neighbors.size());
    if (self_weight != 0) {
      inputs.push_back(host_.const_data_ptr());
      weights.push_back(self_weight);
    }
    double p = 0;
    for (const auto& [rank, weight] : neighbors) {
      auto& place = memory_->slot(neighbor("Window.update", "neighbors", rank, true, false).slot);
      const auto view = place.slot.pin(reset, with_p);
      pinned.push_back(&place.slot);
      p += weight * view.p;
      if (!view.empty && weight != 0) {
        inputs.push_back(memory_->buffer(place, view.buffer));
        weights.push_back(weight);
      }
    }
    linear_combination(values_.dtype, result.mutable_data_ptr(), inputs, weights, values_.numel);
    if (!clone) {
      count_change(host_);
    }
    for (auto* slot : pinned) {
      slot->unpin();
    }
    if (with_p) {
      const std::lock_guard<std::mutex> lock(p_mutex_);
      p_ = self_weight * p_ + p;
    }
    for (size_t i = 0; i < in_neighbors_.size(); ++i) { // not for pinned slots, whose count restarted at pin()
      auto& slot = memory_->slot(i).slot;
      if (std::find(pinned.begin(), pinned.end(), &slot) == pinned.end()) {
        slot.reset_version();
      }
    }
  };
  if (clone) {
    sum();
  } else {
    change_tensor(deadline, sum);
  }
  return result;
}

int64_t Window::version(int rank) {
  constexpr const char* op = "Window.version";
  const Use use(*this, op, For::kThisRank);
  const auto& source = neighbor(op, "rank", rank, true, false);
  if (source.mailbox) {
    source.mailbox->absorb();
  }
  return memory_->slot(source.slot).slot.version();
}

double Window::slot_p(int rank) {
  constexpr const char* op = "Window.slot_p";
  const Use use(*this, op, For::kThisRank);
  const auto& source = neighbor(op, "rank", rank, true, false);
  if (source.mailbox) {
    source.mailbox->absorb();
  }
  return memory_->slot(source.slot).slot.p();
}

bool Window::is_gone(int rank) const {
  return neighbor("is_gone", "rank", rank, true, true).gone;
}

double Window::p() {
  group_->engine.check_not_forked();
  const std::lock_guard<std::mutex> lock(p_mutex_);
  return p_;
}

void Window::set_p(double p) {
  group_->engine.check_not_forked();
  const std::lock_guard<std::mutex> lock(p_mutex_);
  p_ = p;
}

// --- signals ---

WorkPtr Window::wait_signal(int source, const Options& options) {
  const auto& peer = neighbor("wait_signal", "source", source, true, false);
  const auto call = begin(WindowOp::kSignal, at::Tensor(), options.timeout);
  const auto wait = [this, call, &peer] {
    std::exception_ptr error;
    try {
      if (!take_signal(peer, call->deadline)) {
        fail("wait_signal", c10::str("timed out waiting for a signal of rank ", peer.rank));
      }
    } catch (...) {
      error = std::current_exception();
    }
    call->finish(error);
  };
  if (memory_->control(peer.control).signals.load(std::memory_order_acquire) > 0) {
    wait();
  } else {
    try {
      group_->engine.run_callbacks(wait, Engine::Refused::kThrow); // the call keeps the window alive
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

bool Window::take_signal(const Neighbor& source, Deadline deadline) {
  auto& signals = memory_->control(source.control).signals;
  while (true) {
    const bool gone = source.gone; // read before the signals: the source may have sent one and then gone
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
    futex_wait(signals, 0, std::min<std::chrono::nanoseconds>(kPollInterval, left));
  }
}

at::Tensor Window::map_remote(int rank) {
  group_->engine.check_not_forked();
  auto* mapped = neighbor("map_remote_tensor", "rank", rank, true, true).leg->map();
  if (mapped == nullptr || staging_) {
    return {};
  }
  return at::from_blob(mapped, tensor_.sizes(), [self = shared_from_this()](void*) {}, tensor_.options().requires_grad(false));
}

class WindowSlice::Entry final : public Timeline::Entry {
 public:
  Entry(const char* name, std::string_view arguments, Timeline::Clock::time_point begun)
      : name_(name), arguments_(Timeline::text(arguments)), begun_(begun), ended_(Timeline::Clock::now()) {}

  void write(Timeline::Writer& writer) const override {
    writer.slice(name_, "window", begun_, ended_, arguments_);
  }

 private:
  const char* const name_;
  const Timeline::Text arguments_;
  const Timeline::Clock::time_point begun_;
  const Timeline::Clock::time_point ended_;
};

WindowSlice::WindowSlice() {
  if (Timeline::is_on()) {
    begun_ = Timeline::Clock::now();
    lane_ = Timeline::instance().take_lane(begun_);
  }
}

void WindowSlice::end(const char* name, const std::string& group, const std::string& window, bool failed) noexcept {
  if (lane_ && Timeline::is_on()) {
    try {
      const auto arguments = c10::str(
          "\"group\": ", json_string(group), ", \"window\": ", json_string(window), ", \"ranks\": [", c10::Join(", ", ranks_),
          "], \"bytes\": ", bytes_, failed ? ", \"failed\": true" : "");
      Timeline::instance().add(lane_, std::make_unique<Entry>(name, arguments, begun_));
    } catch (const std::bad_alloc&) { // it is missing in the timeline
    }
  }
  lane_.give_back();
}

} // namespace fog
