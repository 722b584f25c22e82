// Creation and end of a Window.
#include "windows/window.hpp"

#include <algorithm>
#include <string_view>

#include <ATen/Functions.h>
#include <c10/core/DeviceType.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "core/copy.hpp"
#include "core/failure.hpp"
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
  TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, "win_create: no memory for ", slots, " slots of ", bytes, " bytes each");
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
  constexpr char kMaps = '0';
  constexpr char kSends = '1';
  constexpr char kDoesBoth = '2';
  constexpr char kWrites = '3';
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
  constexpr const char* op = "win_free";
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

void Window::apply(
    int source,
    WindowOp op,
    double weight,
    std::optional<double> p,
    uint64_t puts,
    const void* data,
    size_t bytes,
    const std::string& codec) {
  const char* name = name_of(op);
  const Use use(*this, name, For::kNeighbor);
  std::optional<EncodedValues> encoded;
  if (codec.empty()) {
    TORCH_CHECK_VALUE(bytes == values_.bytes, name, ": got ", bytes, " bytes; window '", name_, "' has ", values_.bytes);
  } else {
    encoded.emplace(agreed_codec(name, codec), values_.dtype, values_.numel, data, bytes);
  }
  const GivenValues given{data, encoded ? &*encoded : nullptr};
  auto& peer = neighbor(name, "source", source, true, false);
  if (peer.mailbox) {
    peer.mailbox->apply(op, weight, p, puts, given);
    return;
  }
  const std::lock_guard<std::mutex> writing(peer.writing);
  values_.write(*memory_, peer.slot, op, weight, p, given);
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
  const Use use(*this, "win_get", For::kNeighbor);
  const std::lock_guard<std::mutex> owner(owner_);
  copy_bytes(out, memory_->tensor(), values_.bytes);
}

PairMutex& Window::mutex(int source) {
  return memory_->control(neighbor("win_mutex", "source", source, true, true).control).mutex;
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

} // namespace fog
