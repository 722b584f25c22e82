#include "window.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <c10/util/Exception.h>

#include "linear_combination.hpp"
#include "mpi/failure.hpp"
#include "names.hpp"
#include "shared_memory/futex.hpp"
#include "shared_tensors.hpp"
#include "staging.hpp"
#include "window_mutexes.hpp"
#include "window_parts.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;
using mpi::WindowOp;
using shared_memory::ForeignWindow;
using shared_memory::PairMutex;
using shared_memory::WindowMemory;

// How long free() waits before it looks whether somebody has gone.
constexpr auto kLook = std::chrono::milliseconds(10);

// "rank 1", "ranks 0, 2"
std::string list_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  }
  return ranks.empty() ? "no rank" : text;
}

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

size_t index_of(const std::vector<int>& ranks, int rank) {
  return static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

// Memory of windows that were dropped, not freed, while neighbors may still write to it.
class Graveyard {
 public:
  static void bury(std::unique_ptr<WindowMemory> memory, const c10::Storage& storage) {
    static auto* graveyard = new Graveyard(); // the process's end needs no order
    std::vector<Grave> released; // after the lock
    const std::lock_guard<std::mutex> lock(graveyard->mutex_);
    auto& graves = graveyard->graves_;
    graves.push_back({std::move(memory), storage});
    const auto unused = std::stable_partition(graves.begin(), graves.end(), [](const Grave& grave) { return !grave.memory->unused(); });
    std::move(unused, graves.end(), std::back_inserter(released));
    graves.erase(unused, graves.end());
  }

 private:
  struct Grave {
    std::unique_ptr<WindowMemory> memory;
    c10::Storage storage;
  };
  std::mutex mutex_;
  std::vector<Grave> graves_;
};

} // namespace

Window::Window(
    const std::shared_ptr<mpi::Group>& group,
    at::Tensor tensor,
    std::string name,
    std::vector<int> in_neighbors,
    std::vector<int> out_neighbors,
    Milliseconds timeout)
    : group_(group),
      tensor_(std::move(tensor)),
      storage_(tensor_.storage()),
      name_(std::move(name)),
      in_neighbors_(std::move(in_neighbors)),
      out_neighbors_(std::move(out_neighbors)),
      timeout_(timeout),
      dtype_(tensor_.scalar_type()),
      numel_(tensor_.numel()),
      layout_(layout_of(tensor_)),
      bytes_(tensor_.nbytes()) {}

std::shared_ptr<Window> Window::create(
    const std::shared_ptr<mpi::Group>& group,
    const at::Tensor& tensor,
    const std::string& name,
    const std::vector<int>& in_neighbors,
    const std::vector<int>& out_neighbors,
    bool zero_init,
    Milliseconds timeout,
    const Gather& gather) {
  auto& engine = mpi::Engine::instance();
  std::shared_ptr<Window> window;
  std::exception_ptr error;
  WindowDescription mine;
  mine.number = engine.next_window(group);
  mine.name = name;
  mine.in = in_neighbors;
  mine.out = out_neighbors;
  try {
    window = prepare(group, tensor, name, in_neighbors, out_neighbors, zero_init, timeout);
    mine.layout = window->layout_;
    mine.address = window->memory_->address();
  } catch (const std::exception& reason) { // the others, who wait for this rank, are to hear of it
    error = std::current_exception();
    mine.error = mpi::message_of(reason);
  }
  const auto descriptions = decode_descriptions(gather(encode(mine)), group->size());
  if (error) {
    std::rethrow_exception(error);
  }
  check_agreement(descriptions);
  for (const auto& rank : descriptions) { // one that could not make a window counts fewer of them
    window->number_ = std::max(window->number_, rank.number);
  }
  engine.open_window(group, window->number_, window);
  window->registered_ = true;
  window->connect(descriptions, gather);
  return window;
}

std::shared_ptr<Window> Window::prepare(
    const std::shared_ptr<mpi::Group>& group,
    at::Tensor tensor,
    const std::string& name,
    std::vector<int> in_neighbors,
    std::vector<int> out_neighbors,
    bool zero_init,
    Milliseconds timeout) {
  constexpr const char* op = "win_create";
  check_output(op, "tensor", tensor);
  check_linear_combination(op, tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.is_contiguous(), op, ": tensor: got one that is not contiguous; a window's tensor has to be");
  const auto check_ranks = [&](const char* argument, const std::vector<int>& ranks) {
    for (const int rank : ranks) {
      TORCH_CHECK_VALUE(
          rank >= 0 && rank < group->size() && rank != group->rank, op, ": ", argument, ": got rank ", rank, "; allowed are ranks 0 to ",
          group->size() - 1, " of this group of ", group->size(), " except ", group->rank, ", which is this rank");
      TORCH_CHECK_VALUE(std::count(ranks.begin(), ranks.end(), rank) == 1, op, ": ", argument, ": got rank ", rank, " more than once");
    }
  };
  check_ranks("in_neighbors", in_neighbors);
  check_ranks("out_neighbors", out_neighbors);
  share(tensor);
  const auto all = all_neighbors(in_neighbors, out_neighbors);
  auto memory = WindowMemory::create(tensor.mutable_data_ptr(), tensor.nbytes(), in_neighbors.size(), all.size());
  TORCH_CHECK_WITH(
      OutOfMemoryError, memory != nullptr, op, ": no memory for ", in_neighbors.size(), " slots of ", tensor.nbytes(), " bytes each");
  for (size_t i = 0; i < in_neighbors.size() && !zero_init; ++i) {
    auto& place = memory->slot(i);
    std::memcpy(memory->buffer(place, 0), tensor.const_data_ptr(), tensor.nbytes());
    place.slot.start(0);
  }
  auto window = std::shared_ptr<Window>(
      new Window(group, std::move(tensor), name, std::move(in_neighbors), std::move(out_neighbors), timeout));
  window->memory_ = std::move(memory);
  for (size_t door = 0; door < all.size(); ++door) {
    auto neighbor = std::make_unique<Neighbor>();
    neighbor->rank = all[door];
    neighbor->in = contains(window->in_neighbors_, neighbor->rank);
    neighbor->out = contains(window->out_neighbors_, neighbor->rank);
    neighbor->door = door;
    neighbor->slot = index_of(window->in_neighbors_, neighbor->rank);
    neighbor->mutex_here =
        std::make_unique<MappedMutex>(*window, *neighbor, window->memory_->door(door).mutex, PairMutex::Side::kFirst);
    window->neighbors_.push_back(std::move(neighbor));
  }
  return window;
}

void Window::connect(const std::vector<WindowDescription>& descriptions, const Gather& gather) {
  std::string by_messages(static_cast<size_t>(group_->size()), '0'); // whom this rank reaches so
  for (const auto& neighbor : neighbors_) {
    memory_->door(neighbor->door).used.store(1); // from the next gather on
    const auto& there = descriptions[neighbor->rank];
    neighbor->door_there = index_of(all_neighbors(there.in, there.out), group_->rank);
    neighbor->slot_there = index_of(there.in, group_->rank);
    if (mpi::Engine::instance().shares_memory(group_, neighbor->rank) && !there.address.empty()) {
      neighbor->view = ForeignWindow::attach(there.address);
    }
    if (neighbor->view) {
      neighbor->mutex_there = std::make_unique<MappedMutex>(
          *this, *neighbor, neighbor->view->door(neighbor->door_there).mutex, PairMutex::Side::kSecond);
    } else {
      neighbor->mutex_there = std::make_unique<RemoteMutex>(*this, *neighbor);
      by_messages[neighbor->rank] = '1';
    }
  }
  const auto all = gather(by_messages); // and nobody uses a window before all have it
  for (int rank = 0; rank < group_->size(); ++rank) {
    if (all[static_cast<size_t>(rank * group_->size() + group_->rank)] == '1') {
      mpi::Engine::instance().listen_for(group_, number_);
      break;
    }
  }
}

Window::~Window() {
  close("was dropped");
  leave();
  bury();
}

void Window::bury() {
  if (mpi::Engine::instance().forked()) { // all of it is the parent's
    static_cast<void>(memory_.release());
    return;
  }
  if (std::exchange(registered_, false)) {
    mpi::Engine::instance().close_window(group_, number_); // from now on the engine knows nothing of it
  }
  std::unique_lock<std::mutex> lock(state_);
  idle_.wait(lock, [this] { return calls_ == 0; }); // but for what it may be at
  if (!memory_) {
    return;
  }
  for (const auto& neighbor : neighbors_) {
    if (neighbor->ended) {
      memory_->leave(neighbor->door);
    }
  }
  Graveyard::bury(std::move(memory_), storage_);
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
  const std::lock_guard<std::mutex> lock(leaving_); // nobody goes on before it is done
  if (left_.exchange(true) || mpi::Engine::instance().forked()) {
    return;
  }
  for (const auto& neighbor : neighbors_) {
    auto& here = memory_->door(neighbor->door).mutex;
    if (here.held_by(PairMutex::Side::kFirst)) {
      here.unlock(PairMutex::Side::kFirst);
    }
    if (neighbor->view) {
      auto& there = neighbor->view->door(neighbor->door_there).mutex;
      if (there.held_by(PairMutex::Side::kSecond)) {
        there.unlock(PairMutex::Side::kSecond);
      }
      neighbor->view->leave(neighbor->door_there);
    } else if (neighbor->mutex_there) { // it was connected
      mpi::Engine::instance().tell(group_, number_, neighbor->rank, WindowOp::kLeave);
    }
  }
}

void Window::on_group_closed() {
  close("belongs to a group that was destroyed");
  bool idle = false;
  {
    const std::lock_guard<std::mutex> lock(state_);
    idle = calls_ == 0;
  }
  if (idle) { // else whoever ends the last call does it
    leave();
  }
}

void Window::begin_call(const char* op, For whom) {
  mpi::Engine::instance().check_not_forked();
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
  auto& engine = mpi::Engine::instance();
  engine.check_not_forked();
  const auto deadline = Clock::now() + timeout;
  {
    std::unique_lock<std::mutex> lock(state_);
    if (closed_) {
      return;
    }
    closed_reason_ = "was freed";
    closed_ = true;
    while (!idle_.wait_until(lock, std::min(deadline, Clock::now() + kLook), [this] { return calls_ == 0; })) {
      if (Clock::now() >= deadline) {
        fail(op, c10::str("timed out: its timeout of ", timeout.count(), " ms is over; operations of this rank in flight: ", calls_));
      }
      lock.unlock();
      engine.check_interrupt();
      lock.lock();
    }
  }
  leave();
  auto& leaves = memory_->label().leaves;
  while (true) {
    const auto seen = leaves.load();
    std::vector<int> missing;
    for (const auto& neighbor : neighbors_) {
      if (memory_->door(neighbor->door).used.load() != 0 && !neighbor->gone) {
        missing.push_back(neighbor->rank);
      }
    }
    if (missing.empty()) {
      break;
    }
    const auto left = deadline - Clock::now();
    if (left.count() <= 0) {
      fail(
          op, c10::str(
                  "timed out: its timeout of ", timeout.count(), " ms is over; not there: ", list_ranks(missing),
                  " (windows have to be freed in the same order on all ranks)"));
    }
    engine.check_interrupt();
    shared_memory::futex_wait(leaves, seen, std::min<std::chrono::nanoseconds>(kLook, left));
  }
  bury();
}
// --- checks ---

Window::Neighbor& Window::neighbor(const char* op, const char* argument, int rank, bool in, bool out) const {
  for (const auto& neighbor : neighbors_) {
    if (neighbor->rank == rank && ((in && neighbor->in) || (out && neighbor->out))) {
      return *neighbor;
    }
  }
  const auto allowed = in && out ? all_neighbors(in_neighbors_, out_neighbors_) : in ? in_neighbors_ : out_neighbors_;
  TORCH_CHECK_VALUE(
      false, op, ": ", argument, ": got rank ", rank, "; window '", name_, "' has ", list_ranks(allowed), " among the ",
      in && out ? "neighbors" : in ? "in-neighbors" : "out-neighbors", " of rank ", group_->rank);
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

void Window::check_tensor_in_place(const char* op) const {
  TORCH_CHECK_VALUE(
      tensor_.has_storage() && tensor_.scalar_type() == dtype_ && tensor_.nbytes() == bytes_ && tensor_.is_contiguous() &&
          tensor_.const_data_ptr() == memory_->tensor(),
      op, ": the tensor of window '",
      name_, "' has other memory than when the window was made (was its .data assigned, or its dtype or size changed?)");
}

std::string Window::describe(const char* op) const {
  return c10::str(op, " of window '", name_, "' of group '", group_->name, "' on rank ", group_->rank);
}

std::string Window::why_gone(const Neighbor& neighbor) const {
  const std::lock_guard<std::mutex> lock(state_);
  return group_->describe_member(neighbor.rank) + ' ' + neighbor.how;
}

std::exception_ptr Window::failure(const char* op, const std::string& reason) const {
  return mpi::backend_error("fog: " + describe(op) + ": " + reason);
}

void Window::fail(const char* op, const std::string& reason) const {
  std::rethrow_exception(failure(op, reason));
}

PairMutex& Window::mutex(int source) {
  return memory_->door(neighbor("win_mutex", "source", source, true, true).door).mutex;
}

void Window::on_signal(int source) {
  auto& signals = memory_->door(neighbor("signal", "source", source, true, true).door).signals;
  signals.fetch_add(1, std::memory_order_release);
  shared_memory::futex_wake(signals);
}

void Window::on_left(int source) {
  memory_->leave(neighbor("win_free", "source", source, true, true).door);
}

void Window::on_gone(int peer, const std::string& how) {
  for (const auto& neighbor : neighbors_) {
    if (neighbor->rank == peer) {
      {
        const std::lock_guard<std::mutex> lock(state_);
        neighbor->how = how;
      }
      neighbor->ended = how == mpi::kLost || how == mpi::kEnded;
      neighbor->gone = true;
    }
  }
}

} // namespace fog
