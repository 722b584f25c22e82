#include "windows/host_window.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <c10/util/Exception.h>

#include "core/linear_combination.hpp"
#include "core/failure.hpp"
#include "core/names.hpp"
#include "transport/futex.hpp"
#include "transport/shared_memory/shared_tensors.hpp"
#include "core/tensor_checks.hpp"
#include "windows/host_window_mutexes.hpp"
#include "windows/host_window_parts.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kMapped = "shared memory";
constexpr const char* kByMessages = "messages";

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

// Memory of windows that were dropped, not freed, while neighbors may still write to it: until they have left it, or their processes
// have ended.
class Graveyard {
 public:
  using Users = std::vector<std::pair<int, size_t>>; // ranks of the world, with their doors

  static void bury(Engine& engine, std::unique_ptr<WindowMemory> memory, const c10::Storage& storage, Users users) {
    engine.set_ended_listener([](int peer_id) { instance().release(peer_id); });
    {
      const std::lock_guard<std::mutex> lock(instance().mutex_);
      instance().graves_.push_back({std::move(memory), storage, users});
    }
    // From now on this hears of those that end; some may have ended before.
    for (const auto& [peer_id, door] : users) {
      if (engine.has_left(peer_id)) {
        instance().release(peer_id);
      }
    }
    instance().release(-1);
  }

  static size_t size() {
    const std::lock_guard<std::mutex> lock(instance().mutex_);
    return instance().graves_.size();
  }

 private:
  struct Grave {
    std::unique_ptr<WindowMemory> memory;
    c10::Storage storage;
    Users users;
  };

  static Graveyard& instance() {
    static auto* graveyard = new Graveyard(); // the process's end needs no order
    return *graveyard;
  }

  // Gives back what nobody uses once that process does not.
  void release(int peer_id) {
    std::vector<Grave> released; // after the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& grave : graves_) {
      for (const auto& [user, door] : grave.users) {
        if (user == peer_id) {
          grave.memory->leave(door);
        }
      }
    }
    const auto unused =
        std::stable_partition(graves_.begin(), graves_.end(), [](const Grave& grave) { return !grave.memory->unused(); });
    std::move(unused, graves_.end(), std::back_inserter(released));
    graves_.erase(unused, graves_.end());
  }

  std::mutex mutex_;
  std::vector<Grave> graves_;
};

} // namespace

HostWindow::HostWindow(Recipe recipe) : Window(std::move(recipe)) {}

std::shared_ptr<HostWindow> HostWindow::create(Recipe recipe, const Gather& gather, Receiver receiver) {
  const auto group = recipe.group;
  auto& service = WindowService::of(*group);
  std::shared_ptr<HostWindow> window;
  std::exception_ptr error;
  WindowDescription mine;
  mine.number = service.next_window(*group);
  mine.name = recipe.name;
  mine.in = recipe.in_neighbors;
  mine.out = recipe.out_neighbors;
  try {
    window = prepare(std::move(recipe));
    window->receiver_ = std::move(receiver);
    mine.layout = window->layout_;
    mine.address = window->memory_->address();
  } catch (const std::exception& reason) { // the others, who wait for this rank, are to hear of it
    error = std::current_exception();
    mine.error = message_of(reason);
  }
  const auto descriptions = decode_descriptions(gather(encode(mine)), group->size());
  if (error) {
    std::rethrow_exception(error);
  }
  check_agreement(descriptions);
  for (const auto& rank : descriptions) { // one that could not make a window counts fewer of them
    window->number_ = std::max(window->number_, rank.number);
  }
  service.open(group, window->number_, window);
  window->registered_ = true;
  window->connect(descriptions, gather);
  return window;
}

std::shared_ptr<HostWindow> HostWindow::prepare(Recipe recipe) {
  constexpr const char* op = "win_create";
  check_output(op, "tensor", recipe.tensor);
  check_recipe(recipe);
  const auto& tensor = recipe.tensor;
  share(tensor);
  const bool zero_init = recipe.zero_init;
  const auto all = all_neighbors(recipe.in_neighbors, recipe.out_neighbors);
  const size_t slots = recipe.in_neighbors.size();
  auto memory = WindowMemory::create(tensor.mutable_data_ptr(), tensor.nbytes(), slots, all.size());
  TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, op, ": no memory for ", slots, " slots of ", tensor.nbytes(), " bytes each");
  for (size_t i = 0; i < slots && !zero_init; ++i) {
    auto& place = memory->slot(i);
    std::memcpy(memory->buffer(place, 0), tensor.const_data_ptr(), tensor.nbytes());
    place.slot.start(0);
  }
  auto window = std::shared_ptr<HostWindow>(new HostWindow(std::move(recipe)));
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

void HostWindow::connect(const std::vector<WindowDescription>& descriptions, const Gather& gather) {
  // How this rank reaches whom: whether it maps his memory, sends messages, or both.
  constexpr char kMaps = '0';
  constexpr char kSends = '1';
  constexpr char kDoesBoth = '2';
  std::string ways(static_cast<size_t>(group_->size()), kMaps);
  for (const auto& neighbor : neighbors_) {
    memory_->door(neighbor->door).used.store(1); // from the next gather on
    const auto& there = descriptions[neighbor->rank];
    neighbor->door_there = index_of(all_neighbors(there.in, there.out), group_->rank);
    neighbor->slot_there = index_of(there.in, group_->rank);
    if (group_->engine.shares_memory(group_, neighbor->rank) && !there.address.empty()) {
      neighbor->view = ForeignWindow::attach(there.address, bytes_, there.in.size(), all_neighbors(there.in, there.out).size());
    }
    if (neighbor->view) {
      neighbor->mutex_there =
          std::make_unique<MappedMutex>(*this, *neighbor, neighbor->view->door(neighbor->door_there).mutex, PairMutex::Side::kSecond);
    } else {
      neighbor->mutex_there = std::make_unique<RemoteMutex>(*this, *neighbor);
      ways[neighbor->rank] = kSends;
    }
    if (receiver_ && neighbor->view) {
      ways[neighbor->rank] = kDoesBoth;
    }
  }
  const auto all = gather(ways); // and nobody uses a window before all have it
  const auto way_of = [&](int rank) { return all[static_cast<size_t>(rank * group_->size() + group_->rank)]; };
  for (const auto& neighbor : neighbors_) {
    neighbor->maps = way_of(neighbor->rank) != kSends;
  }
  for (int rank = 0; rank < group_->size(); ++rank) {
    if (way_of(rank) != kMaps) {
      WindowService::of(*group_).listen(*group_, number_);
      break;
    }
  }
}

size_t HostWindow::buried() {
  return Graveyard::size();
}

HostWindow::~HostWindow() {
  close("was dropped");
  leave();
  bury();
}

void HostWindow::bury() {
  if (group_->engine.forked()) { // all of it is the parent's
    static_cast<void>(memory_.release());
    return;
  }
  if (std::exchange(registered_, false)) {
    WindowService::of(*group_).close(*group_, number_); // from now on the engine knows nothing of it
  }
  std::unique_lock<std::mutex> lock(state_);
  idle_.wait(lock, [this] { return calls_ == 0; }); // but for what it may be at
  if (!memory_) {
    return;
  }
  Graveyard::Users users;
  for (const auto& neighbor : neighbors_) {
    if (neighbor->ended || !neighbor->maps) {
      memory_->leave(neighbor->door);
    } else {
      users.emplace_back(group_->members[neighbor->rank].peer_id, neighbor->door);
    }
  }
  Graveyard::bury(group_->engine, std::move(memory_), storage_, std::move(users));
}

void HostWindow::close(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(state_);
  abandoned_ = true;
  if (!closed_) {
    closed_reason_ = reason;
    closed_ = true;
  }
}

void HostWindow::leave() {
  const std::lock_guard<std::mutex> lock(leaving_); // nobody goes on before it is done
  if (left_.exchange(true) || group_->engine.forked()) {
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
      WindowService::of(*group_).tell(*group_, number_, neighbor->rank, WindowOp::kLeave);
    }
  }
}

void HostWindow::on_group_closed() {
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

void HostWindow::begin_call(const char* op, For whom) {
  group_->engine.check_not_forked();
  const std::lock_guard<std::mutex> lock(state_);
  if (whom == For::kThisRank ? closed_.load() : abandoned_ || !memory_) {
    fail(op, "the window " + closed_reason_);
  }
  ++calls_;
}

void HostWindow::end_call() {
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

void HostWindow::free(Milliseconds timeout) {
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
          op,
          c10::str(
              "timed out: its timeout of ", timeout.count(), " ms is over; not there: ", list_ranks(missing),
              " (windows have to be freed in the same order on all ranks)"));
    }
    engine.check_interrupt();
    futex_wait(leaves, seen, std::min<std::chrono::nanoseconds>(kLook, left));
  }
  bury();
}
// --- checks ---

HostWindow::Neighbor& HostWindow::neighbor(const char* op, const char* argument, int rank, bool in, bool out) const {
  check_neighbor(op, argument, rank, in, out);
  return **std::find_if(neighbors_.begin(), neighbors_.end(), [rank](const auto& neighbor) { return neighbor->rank == rank; });
}

bool HostWindow::is_neighbor(int rank) const {
  return std::any_of(neighbors_.begin(), neighbors_.end(), [rank](const auto& neighbor) { return neighbor->rank == rank; });
}

const char* HostWindow::transport() const {
  const auto mapped =
      std::count_if(neighbors_.begin(), neighbors_.end(), [](const auto& neighbor) { return neighbor->view != nullptr; });
  return mapped == static_cast<ptrdiff_t>(neighbors_.size()) ? kMapped : mapped == 0 ? kByMessages : "shared memory and messages";
}

const char* HostWindow::transport_to(int rank) const {
  return neighbor("transport_to", "rank", rank, true, true).view ? kMapped : kByMessages;
}

void HostWindow::check_open(const char* op) const {
  if (closed_) {
    const std::lock_guard<std::mutex> lock(state_);
    fail(op, "the window " + closed_reason_);
  }
}

void HostWindow::check_abandoned(const char* op) const {
  if (abandoned_) {
    check_open(op);
  }
}

bool HostWindow::holds_mutex() const {
  return std::any_of(neighbors_.begin(), neighbors_.end(), [](const auto& neighbor) {
    return neighbor->mutex_here->held_here() || neighbor->mutex_there->held_here();
  });
}

std::string HostWindow::why_gone(const Neighbor& neighbor) const {
  const std::lock_guard<std::mutex> lock(state_);
  return group_->describe_member(neighbor.rank) + ' ' + neighbor.how;
}

PairMutex& HostWindow::mutex(int source) {
  return memory_->door(neighbor("win_mutex", "source", source, true, true).door).mutex;
}

void HostWindow::on_signal(int source) {
  auto& signals = memory_->door(neighbor("signal", "source", source, true, true).door).signals;
  signals.fetch_add(1, std::memory_order_release);
  futex_wake(signals);
}

void HostWindow::on_left(int source) {
  memory_->leave(neighbor("win_free", "source", source, true, true).door);
}

void HostWindow::on_gone(int peer, const std::string& how) {
  for (const auto& neighbor : neighbors_) {
    if (neighbor->rank == peer) {
      {
        const std::lock_guard<std::mutex> lock(state_);
        neighbor->how = how;
      }
      neighbor->ended = how == kLost || how == kEnded;
      neighbor->gone = true;
    }
  }
}

} // namespace fog
