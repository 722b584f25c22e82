#include "cuda/peer_window.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <thread>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "engine/engine.hpp"
#include "core/failure.hpp"
#include "cuda/kernels.hpp"

namespace fog::cuda {
namespace {

using WorkPtr = Window::WorkPtr;
using Count = unsigned long long;

constexpr auto kShortest = std::chrono::microseconds(5);
constexpr auto kLongest = std::chrono::microseconds(500);

const Locks kNoLocks{nullptr, 0, 0, 0, nullptr};
constexpr int kSourceIsGone = 2; // of window_wait_signal

// Memory of windows that were dropped, not freed: neighbors may still write to it.
void bury(std::shared_ptr<PeerMemory> memory) {
  static auto* mutex = new std::mutex; // the process's end needs no order
  static auto* graves = new std::vector<std::shared_ptr<PeerMemory>>;
  const std::lock_guard<std::mutex> lock(*mutex);
  graves->push_back(std::move(memory));
}

// The tensor's storage, and so that of all its views, moves.
void move_storage(const at::Tensor& tensor, const std::shared_ptr<PeerMemory>& memory, Handle stream) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  const size_t bytes = storage->nbytes();
  if (bytes == 0) {
    return;
  }
  struct Moved {
    std::shared_ptr<PeerMemory> memory;
    c10::DataPtr old; // where somebody else may look at it
  };
  const auto device = tensor.device();
  const auto& driver = Driver::of(device.type());
  const auto entered = driver.enter(device);
  const auto place = memory->at(memory->layout.storage);
  driver.check(
      driver.memory_copy_async(place, reinterpret_cast<Address>(storage->data()), bytes, stream), "copy the tensor of a window");
  driver.check(driver.stream_synchronize(stream), "copy the tensor of a window");
  auto* moved = new Moved{memory, {}};
  c10::DataPtr data(reinterpret_cast<void*>(place), moved, [](void* both) { delete static_cast<Moved*>(both); }, device);
  if (storage->resizable()) {
    storage->set_data_ptr_noswap(std::move(data));
  } else {
    moved->old = storage->set_data_ptr(std::move(data));
  }
}

} // namespace

PeerWindow::PeerWindow(Recipe recipe, std::shared_ptr<HostWindow> host, std::shared_ptr<PeerMemory> memory)
    : Window(std::move(recipe)),
      host_(std::move(host)),
      device_(storage_.device()),
      memory_(std::move(memory)),
      stream_(device_),
      signals_(Stream::apart(device_)),
      gone_(
          std::make_shared<MappedMemory>(
              device_, sizeof(int) * (all_neighbors(in_neighbors_, out_neighbors_).size() + in_neighbors_.size() + 1))), // not 0 bytes
      cells_(std::make_shared<HostCells>(device_)) {}

std::shared_ptr<PeerWindow> PeerWindow::create(
    Recipe recipe,
    const std::vector<WindowDescription>& descriptions,
    std::shared_ptr<PeerMemory> memory,
    std::vector<std::unique_ptr<ForeignPeerMemory>> views,
    const Gather& gather) {
  const auto device = recipe.tensor.device();
  const auto& driver = Driver::of(device.type());
  const auto entered = driver.enter(device);
  const auto stream = current_stream(device)->native_handle();
  const auto& layout = memory->layout;
  move_storage(recipe.tensor, memory, stream);
  // What is not zero at first.
  std::vector<char> control(layout.control, '\0');
  const double p = 1.0;
  std::memcpy(control.data() + layout.p, &p, sizeof(p));
  for (size_t i = 0; i < recipe.in_neighbors.size() && !recipe.zero_init && recipe.tensor.numel() > 0; ++i) {
    WindowSlot slot{};
    slot.state = 2; // kFilled, in the first buffer
    std::memcpy(control.data() + layout.slots + i * sizeof(slot), static_cast<const void*>(&slot), sizeof(slot));
    driver.check(
        driver.memory_copy_async(
            memory->at(layout.buffers + 2 * i * layout.stride), memory->at(layout.tensor), recipe.tensor.nbytes(), stream),
        "copy the tensor of a window");
  }
  driver.check(
      driver.memory_copy_async(memory->at(0), reinterpret_cast<Address>(control.data()), control.size(), stream),
      "prepare memory of a window");
  driver.check(driver.stream_synchronize(stream), "prepare memory of a window");

  auto inner = recipe;
  {
    const c10::InferenceMode normal(false);
    inner.tensor = at::zeros({1}, at::kDouble);
  }
  auto host = HostWindow::create(std::move(inner), gather); // from here on all ranks have prepared their memory
  const int rank = recipe.group->rank;
  auto window = std::shared_ptr<PeerWindow>(new PeerWindow(std::move(recipe), std::move(host), std::move(memory)));
  const auto all = all_neighbors(window->in_neighbors_, window->out_neighbors_);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto& there = descriptions[all[i]];
    window->neighbors_.push_back(
        {all[i], index_of(window->in_neighbors_, all[i]), i, std::move(views[i]), index_of(there.in, rank),
         index_of(all_neighbors(there.in, there.out), rank)});
  }
  window->load_kernels();
  const auto weak = std::weak_ptr<Window>(window);
  window->host_->set_listener(
      {[weak](int ended) {
         if (const auto alive = std::static_pointer_cast<PeerWindow>(weak.lock())) {
           alive->on_ended(ended);
         }
       },
       [weak] {
         if (const auto alive = std::static_pointer_cast<PeerWindow>(weak.lock())) {
           alive->wait_for_streams();
         }
       }});
  return window;
}

void PeerWindow::load_kernels() {
  cells_->give_back(cells_->take());
  const auto& driver = Driver::of(device_.type());
  const auto entered = driver.enter(device_);
  const std::lock_guard<std::mutex> lock(enqueue_);
  const Stream::Guard guard(stream_);
  // Those that look at `failed` do nothing.
  auto* failed = own<int>(memory_->layout.signal);
  const auto set = [&](unsigned char value) {
    driver.check(
        driver.memory_set_async(memory_->at(memory_->layout.signal), value, sizeof(int), handle(stream_)),
        "prepare memory of a window");
  };
  auto* slot = own<WindowSlot>(memory_->layout.slots);
  auto* buffers = own<char>(memory_->layout.buffers);
  auto* sum = own<Sum>(memory_->layout.sum);
  auto* p = own<double>(memory_->layout.p);
  void* tensor = const_cast<void*>(data_);
  const Count stride = 0;
  const double one = 1.0;
  const int zero = 0;
  const Rows none{};
  set(1);
  begin();
  lock_on_device(kNoLocks, kNoLocks, 1, timeout_);
  start("window_plan_write", {&slot, &slot, &buffers, &stride, &tensor, &one, &zero, &sum, &failed});
  launch_sum(device_, dtype_, sum, static_cast<size_t>(numel_), handle(stream_), failed);
  start("window_publish", {&slot, &zero, &one, &p, &kNoLocks, &kNoLocks, &failed});
  start("window_plan_update", {&none, &slot, &buffers, &stride, &tensor, &one, &tensor, &sum, &failed});
  start("window_finish_update", {&none, &zero, &one, &p, &slot, &zero, &kNoLocks, &kNoLocks, &failed});
  start("window_unlock", {&kNoLocks, &kNoLocks, &failed});
  start("window_scale_p", {&p, &one, &failed});
  start("window_set_p", {&p, &one});
  launch_combine(device_, dtype_, tensor, {tensor}, {1.0}, false, static_cast<size_t>(numel_), handle(stream_), failed);
  auto* door = own<WindowDoor>(memory_->layout.practice);
  start("window_signal", {&door});
  const Count limit = 0;
  const auto* gone = gone_->as<int>();
  start("window_wait_signal", {&door, &gone, &limit, &failed});
  const auto outcome = finish("win_create", {}, stream_, own<int>(memory_->layout.any));
  set(0);
  driver.check(driver.stream_synchronize(handle(stream_)), "run the device's kernels");
}

PeerWindow::~PeerWindow() {
  if (Engine::instance().forked()) { // all of it is the parent's
    for (auto& neighbor : neighbors_) {
      static_cast<void>(neighbor.view.release());
    }
    bury(memory_);
    return;
  }
  if (!wait_for_streams()) { // what is mapped stays
    for (auto& neighbor : neighbors_) {
      static_cast<void>(neighbor.view.release());
    }
    static_cast<void>(new std::shared_ptr<MappedMemory>(gone_));
  }
  if (!freed_) {
    bury(memory_);
  }
}

bool PeerWindow::wait_for_streams() const noexcept {
  const auto deadline = deadline_after(timeout_);
  try {
    for (const auto* stream : {&stream_, &signals_}) {
      const auto end = stream->record();
      while (!has_happened(end)) {
        if (Clock::now() >= deadline) {
          return false;
        }
        std::this_thread::sleep_for(kLongest);
      }
    }
    return true;
  } catch (const std::exception&) { // the device has failed
    return false;
  }
}

WorkPtr PeerWindow::put(const at::Tensor& tensor, const Peers& destinations, const Options& options) {
  return write_slots("win_put", false, tensor, destinations, options);
}

WorkPtr PeerWindow::accumulate(const at::Tensor& tensor, const Peers& destinations, const Options& options) {
  return write_slots("win_accumulate", true, tensor, destinations, options);
}

WorkPtr PeerWindow::write_slots(
    const char* op, bool adds, const at::Tensor& tensor, const Peers& destinations, const Options& options) {
  check(op);
  check_peers(op, "destinations", destinations, true);
  check_input(op, tensor, options.self_weight);
  std::exception_ptr error;
  const auto peers = present(op, destinations, options, error);
  if (error) {
    return failed_work(error);
  }
  const auto held = hold_mutexes(peers, false, options);
  const OperationRange range(op);
  auto lock = begin_call(op);
  const at::AutoDispatchBelowADInplaceOrView no_grad;
  std::shared_ptr<Outcome> outcome;
  WorkPtr work;
  {
    const Stream::Guard guard(stream_);
    const auto data = tensor.contiguous();
    const void* source = data.const_data_ptr();
    const double* p = options.with_p ? own<double>(memory_->layout.p) : nullptr;
    begin();
    std::vector<int> ranks;
    for (const auto& [rank, weight] : peers) {
      const auto& peer = neighbor(rank);
      const auto& there = peer.view->layout();
      auto* first = reinterpret_cast<WindowSlot*>(peer.view->at(there.slots));
      auto* buffers = reinterpret_cast<char*>(peer.view->at(there.buffers));
      const auto locks = lock_of(peer, &first[peer.slot_there].lock, sizeof(WindowSlot), 1);
      ranks.push_back(rank);
      write_slot(
          {first, peer.slot_there, buffers, there.stride}, locks, kNoLocks, adds, source, weight, p, static_cast<int>(ranks.size()),
          options.timeout);
    }
    if (options.self_weight != 1) {
      keep(tensor, data, static_cast<int>(ranks.size()) + 1, options);
    }
    outcome = finish(op, std::move(ranks), stream_, own<int>(memory_->layout.any));
    work = work_of(outcome, {tensor});
  }
  use_on(*stream_.get(), tensor);
  lock.unlock();
  if (held) {
    await(op, outcome->end, deadline_after(options.timeout));
  }
  return work;
}

void PeerWindow::write_slot(
    const SlotPlace& place,
    const Locks& one,
    const Locks& two,
    bool adds,
    const void* source,
    double weight,
    const double* p,
    int part,
    Milliseconds timeout) const {
  auto* const slot = place.first + place.number;
  auto* const first = place.first;
  auto* const buffers = place.buffers;
  const Count stride = place.stride;
  const int to_add = adds ? 1 : 0;
  auto* const sum = own<Sum>(memory_->layout.sum);
  auto* const failed = own<int>(memory_->layout.failed);
  lock_on_device(one, two, part, timeout);
  start("window_plan_write", {&slot, &first, &buffers, &stride, &source, &weight, &to_add, &sum, &failed});
  launch_sum(device_, dtype_, sum, static_cast<size_t>(numel_), handle(stream_), failed);
  start("window_publish", {&slot, &to_add, &weight, &p, &one, &two, &failed});
}

void PeerWindow::keep(const at::Tensor& tensor, const at::Tensor& data, int part, const Options& options) const {
  const bool is_read = tensor.storage().is_alias_of(storage_); // by neighbors
  if (is_read) {
    lock_on_device(own_tensor(), kNoLocks, part, options.timeout);
  }
  const auto* any = own<int>(memory_->layout.any);
  auto* values = data.mutable_data_ptr();
  std::vector<const void*> rows;
  std::vector<double> weights;
  if (options.self_weight != 0) {
    rows.push_back(values);
    weights.push_back(options.self_weight);
  }
  launch_combine(device_, dtype_, values, rows, weights, false, static_cast<size_t>(numel_), handle(stream_), any);
  if (!data.is_same(tensor)) {
    tensor.copy_(data);
  }
  if (options.with_p) {
    auto* p = own<double>(memory_->layout.p);
    start("window_scale_p", {&p, &options.self_weight, &any});
  }
  if (is_read) {
    unlock_on_device(own_tensor(), kNoLocks);
  }
  count_change(tensor);
}

WorkPtr PeerWindow::get(const Peers& sources, const Options& options) {
  constexpr const char* op = "win_get";
  check(op);
  check_peers(op, "sources", sources, false);
  std::exception_ptr error;
  const auto peers = present(op, sources, options, error);
  if (error) {
    return failed_work(error);
  }
  const auto held = hold_mutexes(peers, false, options);
  const OperationRange range(op);
  auto lock = begin_call(op);
  std::shared_ptr<Outcome> outcome;
  WorkPtr work;
  {
    const Stream::Guard guard(stream_);
    auto* first = own<WindowSlot>(memory_->layout.slots);
    auto* buffers = own<char>(memory_->layout.buffers);
    begin();
    std::vector<int> ranks;
    for (const auto& [rank, weight] : peers) {
      const auto& peer = neighbor(rank);
      const auto& there = peer.view->layout();
      auto* door = reinterpret_cast<WindowDoor*>(peer.view->at(there.doors)) + peer.door_there;
      const auto* source = reinterpret_cast<const void*>(peer.view->at(there.tensor));
      const auto here = lock_of(peer, &first[peer.slot].lock, sizeof(WindowSlot), 0);
      const auto its_tensor = lock_of(peer, &door->tensor, sizeof(WindowDoor), 1);
      ranks.push_back(rank);
      write_slot(
          {first, peer.slot, buffers, memory_->layout.stride}, here, its_tensor, false, source, weight, nullptr,
          static_cast<int>(ranks.size()), options.timeout);
    }
    outcome = finish(op, std::move(ranks), stream_, own<int>(memory_->layout.any));
    work = work_of(outcome, {});
  }
  lock.unlock();
  if (held) {
    await(op, outcome->end, deadline_after(options.timeout));
  }
  return work;
}

at::Tensor PeerWindow::update(double self_weight, const Peers& neighbors, bool reset, bool clone, const Options& options) {
  constexpr const char* op = "win_update";
  check(op);
  check_peers(op, "neighbors", neighbors, false);
  check_self_weight(op, self_weight);
  check_tensor_in_place(op);
  const auto held = hold_mutexes(neighbors, true, options);
  const OperationRange range(op);
  auto lock = begin_call(op);
  at::Tensor result = tensor_;
  if (clone) {
    const c10::InferenceMode normal(false);
    result = at::empty(tensor_.sizes(), tensor_.options().requires_grad(false));
  }
  std::shared_ptr<Outcome> outcome;
  {
    const Stream::Guard guard(stream_);
    auto* sum = own<Sum>(memory_->layout.sum);
    auto* failed = own<int>(memory_->layout.failed);
    auto* first = own<WindowSlot>(memory_->layout.slots);
    auto* buffers = own<char>(memory_->layout.buffers);
    const Count stride = memory_->layout.stride;
    const void* tensor = data_;
    void* out = result.mutable_data_ptr();
    double* p = options.with_p ? own<double>(memory_->layout.p) : nullptr;
    const int takes = reset ? 1 : 0;
    const int slots = static_cast<int>(in_neighbors_.size());
    const auto one = own_slots();
    const auto two = clone ? kNoLocks : own_tensor();
    Rows chosen{};
    for (const auto& [rank, weight] : neighbors) {
      chosen.data[chosen.count] = first + neighbor(rank).slot;
      chosen.weights[chosen.count] = weight;
      ++chosen.count;
    }
    begin();
    lock_on_device(one, two, 1, options.timeout);
    start("window_plan_update", {&chosen, &first, &buffers, &stride, &tensor, &self_weight, &out, &sum, &failed});
    launch_sum(device_, dtype_, sum, static_cast<size_t>(numel_), handle(stream_), failed);
    start("window_finish_update", {&chosen, &takes, &self_weight, &p, &first, &slots, &one, &two, &failed});
    outcome = finish(op, {}, stream_, own<int>(memory_->layout.any));
    outcomes_.push_back(outcome);
  }
  if (!clone) {
    count_change(tensor_);
  }
  order_after(outcome->end);
  lock.unlock();
  if (held) {
    await(op, outcome->end, deadline_after(options.timeout));
  }
  return result;
}

WorkPtr PeerWindow::write(const at::Tensor& tensor, int destination, int64_t offset, const Options& options) {
  constexpr const char* op = "put";
  check(op);
  check_neighbor(op, "destination", destination, false, true);
  check_written(op, tensor, offset);
  std::exception_ptr error;
  present(op, {{destination, 1.0}}, options, error);
  if (error) {
    return failed_work(error);
  }
  const OperationRange range(op);
  const auto lock = begin_call(op);
  const auto& view = *neighbor(destination).view;
  const auto& driver = Driver::of(device_.type());
  WorkPtr work;
  {
    const Stream::Guard guard(stream_);
    const auto data = tensor.contiguous();
    begin();
    if (data.nbytes() > 0) {
      const auto to = view.at(view.layout().tensor + static_cast<size_t>(offset) * c10::elementSize(dtype_));
      const auto entered = driver.enter(device_);
      driver.check(
          driver.memory_copy_async(to, reinterpret_cast<Address>(data.const_data_ptr()), data.nbytes(), handle(stream_)),
          "copy to another rank's window");
    }
    work = work_of(finish(op, {destination}, stream_, own<int>(memory_->layout.any)), {tensor});
  }
  use_on(*stream_.get(), tensor);
  return work;
}

WorkPtr PeerWindow::signal(int destination, const Options& options) {
  constexpr const char* op = "signal";
  check(op);
  check_neighbor(op, "destination", destination, false, true);
  std::exception_ptr error;
  present(op, {{destination, 1.0}}, options, error);
  if (error) {
    return failed_work(error);
  }
  const OperationRange range(op);
  const auto lock = begin_call(op);
  const auto& peer = neighbor(destination);
  const Stream::Guard guard(stream_);
  auto* door = reinterpret_cast<WindowDoor*>(peer.view->at(peer.view->layout().doors)) + peer.door_there;
  begin();
  start("window_signal", {&door});
  return work_of(finish(op, {destination}, stream_, own<int>(memory_->layout.any)), {});
}

WorkPtr PeerWindow::wait_signal(int source, const Options& options) {
  constexpr const char* op = "wait_signal";
  check(op);
  check_neighbor(op, "source", source, true, false);
  std::exception_ptr error;
  present(op, {{source, 1.0}}, options, error);
  if (error) {
    return failed_work(error);
  }
  const OperationRange range(op);
  const auto lock = begin_call(op);
  const Stream::Guard guard(signals_);
  const auto& peer = neighbor(source);
  auto* door = own<WindowDoor>(memory_->layout.doors) + peer.door;
  const auto* gone = gone_->as<int>() + peer.door;
  const Count limit = static_cast<Count>(saturating_nanoseconds(options.timeout).count());
  auto* any = own<int>(memory_->layout.signal);
  launch(device_, "window_wait_signal", 1, handle(signals_), {&door, &gone, &limit, &any});
  return work_of(finish(op, {source}, signals_, any), {});
}

at::Tensor PeerWindow::map_remote(int rank) {
  constexpr const char* op = "map_remote_tensor";
  check_neighbor(op, "rank", rank, true, true);
  const auto lock = begin_call(op);
  const auto& view = *neighbor(rank).view;
  return at::for_blob(reinterpret_cast<void*>(view.at(view.layout().tensor)), tensor_.sizes())
      .deleter([self = self()](void*) {})
      .options(tensor_.options().requires_grad(false))
      .target_device(device_)
      .make_tensor();
}

int64_t PeerWindow::version(int rank) {
  constexpr const char* op = "get_win_version";
  check(op);
  check_neighbor(op, "rank", rank, true, false);
  const auto place = memory_->layout.slots + neighbor(rank).slot * sizeof(WindowSlot) + offsetof(WindowSlot, state);
  return static_cast<int64_t>(read(op, place) >> 3);
}

double PeerWindow::p() {
  const auto bits = read("win_associated_p", memory_->layout.p);
  double p = 0;
  std::memcpy(&p, &bits, sizeof(p));
  return p;
}

void PeerWindow::set_p(double p) {
  Engine::instance().check_not_forked();
  const auto lock = begin_call("win_associated_p");
  const Stream::Guard guard(stream_);
  auto* place = own<double>(memory_->layout.p);
  start("window_set_p", {&place, &p});
}

uint64_t PeerWindow::read(const char* op, size_t offset) {
  Engine::instance().check_not_forked();
  auto outcome = std::make_shared<Outcome>(cells_, nullptr);
  const auto& driver = Driver::of(device_.type());
  {
    const auto lock = begin_call(op);
    const Stream::Guard guard(stream_);
    const auto entered = driver.enter(device_);
    driver.check(
        driver.memory_copy_async(reinterpret_cast<Address>(outcome->cell), memory_->at(offset), sizeof(uint64_t), handle(stream_)),
        "read from a window");
    outcome->end = stream_.record();
  }
  await(op, outcome->end, deadline_after(timeout_));
  return *outcome->cell;
}

void PeerWindow::lock(const std::vector<int>& ranks, bool own, Milliseconds timeout) {
  host_->lock(ranks, own, timeout);
}

void PeerWindow::unlock(const std::vector<int>& ranks, bool own) {
  std::exception_ptr error;
  if (host_->holds_mutex() && host_->is_open()) {
    try { // whoever comes next finds done what was called meanwhile
      Event end;
      {
        const std::lock_guard<std::mutex> lock(enqueue_);
        const Stream::Guard guard(stream_);
        end = stream_.record();
      }
      await("win_mutex", end, deadline_after(timeout_));
    } catch (...) {
      error = std::current_exception();
    }
  }
  host_->unlock(ranks, own);
  if (error) {
    std::rethrow_exception(error);
  }
}

void PeerWindow::free(Milliseconds timeout) {
  constexpr const char* op = "win_free";
  Engine::instance().check_not_forked();
  const auto deadline = deadline_after(timeout);
  {
    const std::lock_guard<std::mutex> lock(enqueue_);
    if (std::exchange(closed_, true)) {
      return;
    }
  }
  await(op, stream_.record(), deadline);
  await(op, signals_.record(), deadline);
  for (auto& neighbor : neighbors_) { // before anybody gives its memory back
    neighbor.view->close();
  }
  host_->free(std::max(Milliseconds(1), std::chrono::ceil<Milliseconds>(deadline - Clock::now())));
  freed_ = true;
}

std::unique_lock<std::mutex> PeerWindow::begin_call(const char* op) {
  std::unique_lock<std::mutex> lock(enqueue_);
  if (closed_) {
    fail(op, "the window was freed");
  }
  return lock;
}

void PeerWindow::check(const char* op) {
  Engine::instance().check_not_forked();
  host_->check_open(op);
  TORCH_CHECK(!is_capturing(device_), "fog: ", describe(op), " cannot be captured into a graph");
  const std::lock_guard<std::mutex> lock(enqueue_);
  while (!outcomes_.empty() && has_happened(outcomes_.front()->end)) {
    const auto outcome = std::move(outcomes_.front());
    outcomes_.pop_front();
    if (!outcome->heard) {
      if (const auto error = outcome->error()) {
        std::rethrow_exception(error);
      }
    }
  }
}

Window::Peers PeerWindow::present(const char* op, const Peers& peers, const Options& options, std::exception_ptr& error) const {
  Peers there;
  for (const auto& peer : peers) {
    const auto why = host_->why_gone(peer.first);
    if (why.empty()) {
      there.push_back(peer);
    } else if (!options.skip_lost) {
      error = failure(op, why);
    }
  }
  return there;
}

std::unique_ptr<Window::Hold> PeerWindow::hold_mutexes(const Peers& peers, bool own, const Options& options) {
  if (!options.mutex || peers.empty()) {
    return nullptr;
  }
  std::vector<int> ranks;
  for (const auto& [rank, weight] : peers) {
    ranks.push_back(rank);
  }
  return host_->hold(std::move(ranks), own, options.timeout);
}

const PeerWindow::Neighbor& PeerWindow::neighbor(int rank) const {
  return *std::find_if(neighbors_.begin(), neighbors_.end(), [rank](const Neighbor& neighbor) { return neighbor.rank == rank; });
}

void PeerWindow::start(const char* kernel, std::initializer_list<const void*> arguments) const {
  launch(device_, kernel, 1, handle(stream_), arguments);
}

void PeerWindow::begin() const {
  auto* began = own<Count>(memory_->layout.began);
  auto* any = own<int>(memory_->layout.any);
  start("window_begin", {&began, &any});
}

void PeerWindow::lock_on_device(const Locks& one, const Locks& two, int part, Milliseconds timeout) const {
  const auto* began = own<Count>(memory_->layout.began);
  const Count limit = static_cast<Count>(saturating_nanoseconds(timeout).count());
  auto* failed = own<int>(memory_->layout.failed);
  auto* any = own<int>(memory_->layout.any);
  start("window_lock", {&one, &two, &began, &limit, &part, &failed, &any});
}

void PeerWindow::unlock_on_device(const Locks& one, const Locks& two) const {
  const auto* failed = own<int>(memory_->layout.failed);
  start("window_unlock", {&one, &two, &failed});
}

std::shared_ptr<Outcome> PeerWindow::finish(const char* op, std::vector<int> ranks, const Stream& stream, const int* any) {
  auto its_failure = [ranks = std::move(ranks), op, what = describe(op), host = host_](int part) {
    const bool waits = std::strcmp(op, "wait_signal") == 0;
    if (waits && part == kSourceIsGone) {
      return backend_error(c10::str("fog: ", what, ": ", host->why_gone(ranks[0])));
    }
    const auto place = static_cast<size_t>(part) - 1;
    const auto whom = place < ranks.size() ? c10::str("rank ", ranks[place]) : std::string("the neighbors");
    return backend_error(
        c10::str(
            "fog: ", what, ": timed out waiting for ", waits ? "a signal of " : "", whom,
            waits ? "" : " to end what it does in the window"));
  };
  auto outcome = std::make_shared<Outcome>(cells_, std::move(its_failure));
  auto* word = outcome->word();
  launch(device_, "window_report", 1, handle(stream), {&any, &word});
  outcome->end = stream.record();
  return outcome;
}

WorkPtr PeerWindow::work_of(std::shared_ptr<Outcome> outcome, std::vector<at::Tensor> tensors) {
  outcomes_.push_back(outcome);
  return c10::make_intrusive<OperationWork>(group_->rank, device_, std::move(tensors), std::move(outcome), nullptr);
}

WorkPtr PeerWindow::failed_work(std::exception_ptr error) const {
  return c10::make_intrusive<OperationWork>(group_->rank, device_, std::vector<at::Tensor>(), nullptr, std::move(error));
}

Locks PeerWindow::own_slots() const {
  return {
      &own<WindowSlot>(memory_->layout.slots)->lock, sizeof(WindowSlot), static_cast<int>(in_neighbors_.size()), 0,
      gone_->as<int>() + neighbors_.size()};
}

Locks PeerWindow::own_tensor() const {
  return {
      &own<WindowDoor>(memory_->layout.doors)->tensor, sizeof(WindowDoor), static_cast<int>(neighbors_.size()), 0, gone_->as<int>()};
}

Locks PeerWindow::lock_of(const Neighbor& neighbor, PairLock* lock, size_t stride, int side) const {
  return {lock, stride, 1, side, gone_->as<int>() + neighbor.door};
}

Handle PeerWindow::handle(const Stream& stream) const {
  return stream.get()->native_handle();
}

void PeerWindow::await(const char* op, const Event& event, Deadline deadline) const {
  std::chrono::nanoseconds pause = kShortest;
  while (!has_happened(event)) {
    if (Clock::now() >= deadline) {
      fail(op, c10::str("timed out waiting for ", device_, " to do what it was given before"));
    }
    Engine::instance().check_interrupt();
    std::this_thread::sleep_for(pause);
    pause = std::min<std::chrono::nanoseconds>(2 * pause, kLongest);
  }
}

void PeerWindow::on_ended(int rank) {
  const auto& peer = neighbor(rank);
  gone_->as<int>()[peer.door] = 1;
  if (peer.slot < in_neighbors_.size()) {
    gone_->as<int>()[neighbors_.size() + peer.slot] = 1;
  }
}

} // namespace fog::cuda
