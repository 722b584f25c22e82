// Creation and end of a Window.
#include "windows/window.hpp"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/DeviceType.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "core/arithmetic.hpp"
#include "core/copy.hpp"
#include "core/failure.hpp"
#include "core/names.hpp"
#include "core/tensor_checks.hpp"
#include "transport/futex.hpp"
#include "transport/shared_memory/shared_tensors.hpp"
#include "windows/deferred_free.hpp"
#include "windows/remote_leg.hpp"
#include "windows/window_legs.hpp"
#include "windows/window_pool.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

// Returns the tensor, or a copy of it on the host, in memory that neighbors can reach.
at::Tensor on_host(const at::Tensor& tensor) {
  auto host = tensor;
  if (!tensor.device().is_cpu()) {
    const c10::InferenceMode normal(false);
    host = at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU));
    host.copy_(tensor.detach()); // waits for the device
  }
  share(host);
  return host;
}

} // namespace

Window::Window(WindowConfig config, at::Tensor host)
    : group_(std::move(config.group)),
      tensor_(std::move(config.tensor)),
      host_(std::move(host)),
      storage_(host_.storage()),
      name_(std::move(config.name)),
      in_neighbors_(std::move(config.in_neighbors)),
      out_neighbors_(std::move(config.out_neighbors)),
      timeout_(config.timeout),
      device_(tensor_.device()),
      values_{tensor_.scalar_type(), static_cast<size_t>(tensor_.numel()), tensor_.nbytes()},
      layout_(layout_of(tensor_)),
      data_(tensor_.const_data_ptr()) {}

std::shared_ptr<Window> Window::create(WindowConfig config, const Gather& gather, const StagingFactory& make_staging) {
  const auto group = config.group;
  auto& service = WindowService::of(*group);
  std::shared_ptr<Window> window;
  std::exception_ptr error;
  WindowDescription mine;
  mine.number = service.next_window(*group);
  mine.name = config.name;
  mine.in = config.in_neighbors;
  mine.out = config.out_neighbors;
  try {
    window = prepare(std::move(config), make_staging);
    mine.layout = window->layout_;
    if (window->staging_) {
      mine.layout += " on " + c10::DeviceTypeName(window->device_.type(), true);
    }
    mine.address = window->memory_->address();
    if (const auto* pool = window->memory_->pool()) {
      mine.pool = pool->addresses(window->memory_->label());
    }
  } catch (const std::exception& reason) { // the other ranks wait for this rank and have to learn of the error
    error = std::current_exception();
    mine.error = message_of(reason);
  }
  const auto descriptions = decode_descriptions(gather(encode(mine)), group->size());
  if (error) {
    std::rethrow_exception(error);
  }
  check_agreement(descriptions);
  for (const auto& rank : descriptions) { // a rank that could not create a window has a smaller number
    window->number_ = std::max(window->number_, rank.number);
  }
  service.open(group, window->number_, window, window->memory_, all_neighbors(mine.in, mine.out));
  window->registered_ = true;
  window->connect(descriptions, gather);
  return window;
}

std::shared_ptr<Window> Window::prepare(WindowConfig config, const StagingFactory& make_staging) {
  check_config(config);
  auto host = on_host(config.tensor);
  auto pool = WindowPool::create(config, host); // may move the tensor's memory to the pool
  const bool zero_init = config.zero_init;
  auto window = std::shared_ptr<Window>(new Window(std::move(config), std::move(host)));
  auto* data = window->host_.mutable_data_ptr();
  const size_t bytes = window->bytes();
  const size_t slots = window->in_neighbors_.size();
  const auto all = all_neighbors(window->in_neighbors_, window->out_neighbors_);
  auto memory = WindowMemory::create(data, bytes, slots, all.size(), std::move(pool));
  TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, "Window: no memory for ", slots, " slots of ", bytes, " bytes each");
  for (size_t i = 0; i < slots && !zero_init; ++i) {
    auto& place = memory->slot(i);
    copy_bytes(memory->buffer(place, 0), data, bytes);
    place.slot.start(0);
  }
  window->memory_ = std::move(memory);
  for (const int rank : all) {
    auto neighbor = std::make_unique<Neighbor>();
    neighbor->rank = rank;
    neighbor->in = contains(window->in_neighbors_, rank);
    neighbor->out = contains(window->out_neighbors_, rank);
    neighbor->control = window->neighbors_.size();
    neighbor->slot = index_of(window->in_neighbors_, rank);
    auto& word = window->memory_->control(neighbor->control).mutex;
    neighbor->mutex_here = window->make_mutex(window->word_of(word, PairMutex::Side::kFirst, *neighbor));
    const auto* pooled = neighbor->in ? window->memory_->pool() : nullptr;
    if (auto* mailbox = pooled != nullptr ? pooled->mailbox(neighbor->slot) : nullptr) {
      neighbor->mailbox = std::make_unique<MailboxReader>(*mailbox, *window->memory_, neighbor->slot, window->values_);
    }
    window->neighbors_.push_back(std::move(neighbor));
  }
  if (make_staging) {
    window->staging_ = make_staging(*window);
  }
  return window;
}

void Window::connect(const std::vector<WindowDescription>& descriptions, const Gather& gather) {
  // How this rank reaches each other rank: by mapping its memory, by messages, by both, or by RMA and messages.
  enum Way : char { kMaps = '0', kSends, kDoesBoth, kWrites };
  std::string ways(static_cast<size_t>(group_->size()), kMaps);
  for (const auto& neighbor : neighbors_) {
    memory_->control(neighbor->control).used.store(1); // set before the next gather, from which the neighbor may use it
    const auto& there = descriptions[neighbor->rank];
    neighbor->leg = MappedLeg::create(*this, *neighbor, there);
    if (neighbor->leg && staging_) { // the target's engine copies to the device
      neighbor->raw_leg = std::make_unique<MessageLeg>(*this, *neighbor);
      ways[neighbor->rank] = kDoesBoth;
    } else if (!neighbor->leg) {
      neighbor->leg = RemoteLeg::create(*this, *neighbor, there);
      ways[neighbor->rank] = neighbor->leg ? kWrites : kSends;
    }
    if (!neighbor->leg) {
      neighbor->leg = std::make_unique<MessageLeg>(*this, *neighbor);
    }
    neighbor->mutex_there = make_mutex(neighbor->leg->mutex());
  }
  const auto all = gather(ways); // no rank uses the window before all have created it
  const auto way_of = [&](int rank) { return all[static_cast<size_t>(rank * group_->size() + group_->rank)]; };
  std::vector<PeerId> tellers;
  for (const auto& neighbor : neighbors_) {
    neighbor->writes = way_of(neighbor->rank) != kSends;
    neighbor->tells = way_of(neighbor->rank) == kWrites;
    if (neighbor->tells) {
      tellers.push_back(group_->members[neighbor->rank].peer_id);
    }
  }
  for (int rank = 0; rank < group_->size(); ++rank) {
    if (way_of(rank) != kMaps) {
      WindowService::of(*group_).listen(*group_, number_, std::move(tellers));
      break;
    }
  }
}

std::string Window::transport() const {
  if (staging_) {
    return "staged";
  }
  std::string all;
  for (const char* name : {MappedLeg::kName, RemoteLeg::kName, MessageLeg::kName}) {
    if (std::any_of(neighbors_.begin(), neighbors_.end(), [&](const auto& neighbor) {
          return std::string_view(neighbor->leg->name()) == name;
        })) {
      all += (all.empty() ? "" : " and ") + std::string(name);
    }
  }
  return all.empty() ? MappedLeg::kName : all;
}

std::string Window::transport_to(int rank) const {
  const auto& leg = *neighbor("transport_to", "rank", rank, true, true).leg;
  return !staging_ ? leg.name() : leg.map() != nullptr ? "staged" : std::string("staged, by ") + leg.name();
}

Window::~Window() {
  staging_.reset(); // a device may still read the memory that is released next
  close("was dropped");
  leave();
  release_memory();
}

void Window::release_memory() {
  if (group_->engine.forked()) { // all of it belongs to the parent
    static_cast<void>(new auto(std::move(memory_)));
    return;
  }
  if (memory_) {
    DeferredFree::Users users;
    for (const auto& neighbor : neighbors_) {
      if (neighbor->ended || !neighbor->writes) {
        memory_->leave(neighbor->control);
      } else {
        users.push_back({group_->members[neighbor->rank].peer_id, neighbor->control, neighbor->tells});
      }
    }
    DeferredFree::keep(group_->engine, {group_->id, number_}, memory_, storage_, std::move(users));
  }
  if (std::exchange(registered_, false)) {
    WindowService::of(*group_).close(*group_, number_); // the engine finds the window no more
  }
  std::unique_lock<std::mutex> lock(state_);
  idle_.wait(lock, [this] { return calls_ == 0; }); // the engine may still be in a call
  memory_.reset();
}

void Window::close(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(state_);
  abandoned_ = true;
  if (!closed_) {
    closed_reason_ = reason;
    closed_ = true;
  }
}

void Window::leave() {
  const std::lock_guard<std::mutex> lock(leaving_); // a second caller waits until the first one is done
  if (left_.exchange(true) || group_->engine.forked() || !memory_) {
    return;
  }
  for (const auto& neighbor : neighbors_) {
    memory_->control(neighbor->control).mutex.unlock(PairMutex::Side::kFirst);
    if (neighbor->leg) { // null if connect() was not reached
      neighbor->leg->leave();
    }
  }
}

void Window::on_group_closed(const std::string& reason) {
  close(reason);
  bool idle = false;
  {
    const std::lock_guard<std::mutex> lock(state_);
    idle = calls_ == 0;
  }
  if (idle) { // otherwise the thread that ends the last call leaves
    leave();
    return;
  }
  for (const auto& neighbor : neighbors_) {
    if (neighbor->leg) {
      neighbor->leg->on_closing();
    }
  }
}

void Window::begin_call(const char* op, For whom) {
  group_->engine.check_not_forked();
  if (whom == For::kThisRank) {
    group_->engine.note_call();
  }
  const std::lock_guard<std::mutex> lock(state_);
  if (whom == For::kThisRank ? closed_.load() : abandoned_ || !memory_) {
    fail(op, "the window " + closed_reason_);
  }
  ++calls_;
}

void Window::end_call() {
  bool last = false;
  {
    const std::lock_guard<std::mutex> lock(state_);
    last = --calls_ == 0 && abandoned_;
    idle_.notify_all();
  }
  if (last) {
    leave();
  }
}

void Window::free(Milliseconds timeout) {
  constexpr const char* op = "Window.free";
  auto& engine = group_->engine;
  engine.check_not_forked();
  const auto deadline = deadline_after(timeout);
  {
    std::unique_lock<std::mutex> lock(state_);
    if (closed_) {
      return;
    }
    closed_reason_ = "was freed";
    closed_ = true;
    while (!idle_.wait_until(lock, std::min(deadline, Clock::now() + kPollInterval), [this] { return calls_ == 0; })) {
      if (Clock::now() >= deadline) {
        fail(op, c10::str("timed out: its timeout of ", timeout.count(), " ms is over; operations of this rank in flight: ", calls_));
      }
      lock.unlock();
      engine.check_interrupt();
      lock.lock();
    }
  }
  if (staging_) {
    staging_->drain(op, deadline);
  }
  leave();
  auto& leaves = memory_->label().leaves;
  while (true) {
    const auto seen = leaves.load();
    std::vector<int> missing;
    for (const auto& neighbor : neighbors_) {
      if (memory_->control(neighbor->control).used.load() != 0 && !neighbor->gone) {
        missing.push_back(neighbor->rank);
      }
    }
    if (missing.empty()) {
      break;
    }
    const auto left = deadline - Clock::now();
    if (left.count() <= 0) {
      fail(
          op,
          c10::str(
              "timed out: its timeout of ", timeout.count(), " ms is over; not there: ", list_ranks(missing),
              " (windows have to be freed in the same order on all ranks)"));
    }
    engine.check_interrupt();
    futex_wait(leaves, seen, std::min<std::chrono::nanoseconds>(kPollInterval, left));
  }
  release_memory();
}

// --- for the WindowService ---

bool Window::is_neighbor(int rank) const {
  return std::any_of(neighbors_.begin(), neighbors_.end(), [rank](const auto& neighbor) { return neighbor->rank == rank; });
}

bool Window::is_in(const c10::Storage& storage) const {
  return storage_.is_alias_of(storage);
}

void Window::apply(int source, WindowOp op, double weight, std::optional<double> p, uint64_t puts, const void* data, size_t bytes) {
  const char* name = name_of(op);
  const Use use(*this, name, For::kNeighbor);
  TORCH_CHECK_VALUE(bytes == values_.bytes, name, ": got ", bytes, " bytes; window '", name_, "' has ", values_.bytes);
  auto& peer = neighbor(name, "source", source, true, false);
  if (peer.mailbox) {
    peer.mailbox->accumulate(weight, p, puts, data);
    return;
  }
  const std::lock_guard<std::mutex> writing(peer.writing);
  values_.write(*memory_, peer.slot, op, weight, p, data);
}

void Window::receive(size_t offset, const void* data, size_t bytes) {
  const Use use(*this, "put", For::kNeighbor);
  TORCH_CHECK_VALUE(
      offset <= values_.bytes && bytes <= values_.bytes - offset, "put: got ", bytes, " bytes from byte ", offset, " on; window '",
      name_, "' has ", values_.bytes);
  if (staging_) {
    staging_->receive(offset, data, bytes);
  } else {
    copy_bytes(memory_->tensor() + offset, data, bytes);
  }
}

void Window::read(void* out) {
  const Use use(*this, "Window.get", For::kNeighbor);
  const std::lock_guard<std::mutex> owner(owner_);
  copy_bytes(out, memory_->tensor(), values_.bytes);
}

PairMutex& Window::mutex(int source) {
  return memory_->control(neighbor("Window.mutex", "source", source, true, true).control).mutex;
}

void Window::on_signal(int source) {
  memory_->control(neighbor("signal", "source", source, true, true).control).signal();
}

void Window::on_gone(int peer, const std::string& how) {
  for (const auto& neighbor : neighbors_) {
    if (neighbor->rank == peer) {
      {
        const std::lock_guard<std::mutex> lock(state_);
        neighbor->how = how;
      }
      neighbor->ended = how == kLost || how == kEnded;
      neighbor->lost = how.rfind("was lost", 0) == 0;
      neighbor->gone = true;
    }
  }
}

// The checks of a Window's arguments and state, and its error messages.

void Window::check_config(const WindowConfig& config) {
  constexpr const char* op = "Window";
  check_output(op, "tensor", config.tensor, config.tensor.defined() ? config.tensor.device() : at::kCPU);
  check_linear_combination(op, config.tensor.scalar_type());
  TORCH_CHECK_VALUE(config.tensor.is_contiguous(), op, ": tensor: got one that is not contiguous; a window's tensor has to be");
  const auto& group = *config.group;
  const auto check_ranks = [&](const char* argument, const std::vector<int>& ranks) {
    for (const int rank : ranks) {
      TORCH_CHECK_VALUE(
          rank >= 0 && rank < group.size() && rank != group.rank, op, ": ", argument, ": got rank ", rank, "; allowed are ranks 0 to ",
          group.size() - 1, " of this group of ", group.size(), " except ", group.rank, ", which is this rank");
      TORCH_CHECK_VALUE(std::count(ranks.begin(), ranks.end(), rank) == 1, op, ": ", argument, ": got rank ", rank, " more than once");
    }
  };
  check_ranks("in_neighbors", config.in_neighbors);
  check_ranks("out_neighbors", config.out_neighbors);
}

Window::Neighbor& Window::neighbor(const char* op, const char* argument, int rank, bool in, bool out) const {
  for (const auto& neighbor : neighbors_) {
    if (neighbor->rank == rank && ((in && neighbor->in) || (out && neighbor->out))) {
      return *neighbor;
    }
  }
  const auto allowed = in && out ? all_neighbors(in_neighbors_, out_neighbors_) : in ? in_neighbors_ : out_neighbors_;
  TORCH_CHECK_VALUE(
      false, op, ": ", argument, ": got rank ", rank, "; window '", name_, "' has ", list_ranks(allowed), " among the ",
      in && out ? "neighbors"
          : in  ? "in-neighbors"
                : "out-neighbors",
      " of rank ", group_->rank);
}

void Window::check_peers(const char* op, const char* argument, const Peers& peers, bool out) const {
  for (const auto& [rank, weight] : peers) {
    const int peer = rank;
    neighbor(op, argument, peer, !out, out);
    const auto same = [peer](const auto& other) { return other.first == peer; };
    TORCH_CHECK_VALUE(std::count_if(peers.begin(), peers.end(), same) == 1, op, ": ", argument, ": got rank ", rank, " more than once");
    TORCH_CHECK_VALUE(
        std::isfinite(weight), op, ": ", argument, ": got weight ", weight, " for rank ", rank, "; allowed are finite numbers");
  }
}

void Window::check_input(const char* op, const at::Tensor& tensor, double self_weight) const {
  check_tensor(op, "tensor", tensor, device_);
  if (tensor.is_same(tensor_)) {
    check_tensor_in_place(op);
  } else {
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == values_.dtype && values_.numel == static_cast<size_t>(tensor.numel()) && layout_of(tensor) == layout_,
        op, ": tensor: got ", layout_of(tensor), "; allowed is ", layout_, " as window '", name_, "' has it");
  }
  check_self_weight(op, self_weight);
  if (self_weight != 1) {
    check_output(op, "tensor", tensor, device_);
  }
}

void Window::check_written(const char* op, const at::Tensor& tensor, int64_t offset) const {
  check_tensor(op, "tensor", tensor, device_);
  const auto numel = static_cast<int64_t>(values_.numel);
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == values_.dtype && offset >= 0 && tensor.numel() <= numel - offset, op, ": tensor: got ", layout_of(tensor),
      " for element ", offset, "; window '", name_, "' is ", layout_);
}

void Window::check_self_weight(const char* op, double self_weight) const {
  TORCH_CHECK_VALUE(std::isfinite(self_weight), op, ": self_weight: got ", self_weight, "; allowed are finite numbers");
}

void Window::check_tensor_in_place(const char* op) const {
  TORCH_CHECK_VALUE(
      is_tensor_in_place(), op, ": the tensor of window '", name_,
      "' has other memory than when the window was made (was its .data assigned, or its dtype or size changed?)");
}

bool Window::is_tensor_in_place() const {
  return tensor_.has_storage() && tensor_.scalar_type() == values_.dtype && tensor_.nbytes() == values_.bytes &&
      tensor_.is_contiguous() && tensor_.const_data_ptr() == data_;
}

void Window::check_open(const char* op) const {
  if (closed_) {
    const std::lock_guard<std::mutex> lock(state_);
    fail(op, "the window " + closed_reason_);
  }
}

void Window::check_abandoned(const char* op) const {
  if (abandoned_) {
    check_open(op);
  }
}

std::string Window::describe(const char* op) const {
  return c10::str(op, " of window '", name_, "' of group '", group_->name, "' on rank ", group_->rank);
}

std::exception_ptr Window::failure(const char* op, const std::string& reason) const {
  return backend_error("fog: " + describe(op) + ": " + reason);
}

void Window::fail(const char* op, const std::string& reason) const {
  std::rethrow_exception(failure(op, reason));
}

std::string Window::why_gone(const Neighbor& neighbor) const {
  const std::lock_guard<std::mutex> lock(state_);
  return group_->describe_member(neighbor.rank) + ' ' + neighbor.how;
}

void Window::refused(const char* op, const std::exception& refusal) const {
  fail(op, c10::str("the operation has to wait, and the system refuses a thread for that: ", message_of(refusal)));
}

// The mutexes of a Window, one for each pair of an owner and a neighbor.

std::unique_ptr<RankMutex> Window::make_mutex(RankMutex::Other other) const {
  return std::make_unique<RankMutex>(std::move(other), [this] { group_->engine.check_interrupt(); });
}

RankMutex::Other Window::word_of(PairMutex& word, PairMutex::Side side, const Neighbor& other) const {
  return {
      [this, &word, side, &other](Deadline deadline) { return acquire(word, side, other, deadline); },
      [&word, side] { return word.try_lock(side); },
      [this, &word, side] {
        const std::lock_guard<std::mutex> lock(leaving_); // keeps leave() from releasing the memory meanwhile
        if (!left_ && !group_->engine.forked()) { // otherwise leave() has unlocked it, or the parent will
          word.unlock(side);
        }
      }};
}

bool Window::acquire(PairMutex& mutex, PairMutex::Side side, const Neighbor& neighbor, Deadline deadline) const {
  while (!mutex.lock_or_queue(side)) { // repeats if the other side has seized the mutex
    if (mutex.wait(side, std::min<std::chrono::nanoseconds>(kPollInterval, deadline - Clock::now()))) {
      return true;
    }
    if (neighbor.ended || neighbor.lost) {
      mutex.seize(side);
      return true;
    }
    if (abandoned_ || Clock::now() >= deadline) {
      if (!mutex.give_up(side)) {
        return true;
      }
      check_abandoned("Window.mutex");
      return false;
    }
    try {
      group_->engine.check_interrupt();
    } catch (...) {
      if (!mutex.give_up(side)) {
        mutex.unlock(side);
      }
      throw;
    }
  }
  return true;
}

bool Window::holds_mutex() const {
  return std::any_of(neighbors_.begin(), neighbors_.end(), [](const auto& neighbor) {
    return neighbor->mutex_here->held_here() || neighbor->mutex_there->held_here();
  });
}

void Window::lock(RankMutex& mutex, int owner, int other, Deadline deadline) const {
  if (!mutex.lock(deadline)) {
    fail("Window.mutex", c10::str("timed out waiting for the mutex of owner ", owner, " and rank ", other));
  }
}

std::unique_ptr<Window::Hold> Window::hold(std::vector<int> ranks, bool own, Milliseconds timeout, bool publish) {
  const Use use(*this, "Window.mutex", For::kThisRank);
  const auto deadline = deadline_after(timeout);
  std::sort(ranks.begin(), ranks.end()); // so the mutexes are in order by owner, then by the other rank
  std::vector<RankMutex*> mutexes;
  for (const int rank : ranks) {
    auto& other = neighbor("Window.mutex", "ranks", rank, true, true);
    mutexes.push_back(own ? other.mutex_here.get() : other.mutex_there.get());
  }
  size_t held = 0;
  try {
    for (; held < mutexes.size(); ++held) {
      lock(*mutexes[held], own ? group_->rank : ranks[held], own ? ranks[held] : group_->rank, deadline);
    }
  } catch (...) {
    for (size_t i = 0; i < held; ++i) {
      mutexes[i]->unlock();
    }
    throw;
  }
  return std::make_unique<Hold>(shared_from_this(), std::move(mutexes), own && publish);
}

void Window::Hold::release() {
  if (!window_) {
    return;
  }
  window_->engine().check_not_forked();
  const bool all = std::all_of(mutexes_.begin(), mutexes_.end(), [](RankMutex* mutex) { return mutex->held_here(); });
  TORCH_CHECK_VALUE(all, "Window.mutex: some mutexes of window '", window_->name_, "' are not locked by this thread");
  const auto window = std::exchange(window_, nullptr);
  std::exception_ptr error;
  if (window->staging_ && publish_ && !mutexes_.empty() && !window->closed_ && window->is_tensor_in_place()) {
    try {
      const Use use(*window, "Window.mutex", For::kThisRank);
      window->staging_->publish("Window.mutex", deadline_after(window->timeout_));
    } catch (...) { // the mutexes are released in any case
      error = std::current_exception();
    }
  }
  for (auto* mutex : mutexes_) {
    mutex->unlock();
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

Window::Hold::~Hold() {
  if (window_ && !window_->engine().forked()) { // otherwise the parent holds it
    release();
  }
}

} // namespace fog
