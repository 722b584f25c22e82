#include "window.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <sstream>
#include <thread>

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "linear_combination.hpp"
#include "mpi/engine.hpp"
#include "names.hpp"
#include "shared_memory/futex.hpp"
#include "shared_tensors.hpp"
#include "staging.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using mpi::WindowOp;
using shared_memory::Door;
using shared_memory::ForeignWindow;
using shared_memory::PairMutex;
using shared_memory::Slot;
using shared_memory::WindowMemory;
using shared_memory::WindowView;

// How long a wait lasts before it looks whether whom it waits for has gone.
constexpr auto kLook = std::chrono::milliseconds(10);
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
    case WindowOp::kLock:
    case WindowOp::kUnlock:
      return "win_mutex";
    case WindowOp::kLeave:
      break;
  }
  return "win_free";
}

const char* title_of(WindowOp op) {
  return op == WindowOp::kPut ? "fog:win_put" : op == WindowOp::kAccumulate ? "fog:win_accumulate" : "fog:win_get";
}

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

// "float32[3, 4]"
std::string layout_of(const at::Tensor& tensor) {
  return c10::str(dtype_name(tensor.scalar_type()), tensor.sizes());
}

// In- and out-neighbors, ascending.
std::vector<int> all_of(const std::vector<int>& in, const std::vector<int>& out) {
  std::set<int> all(in.begin(), in.end());
  all.insert(out.begin(), out.end());
  return {all.begin(), all.end()};
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

// What one rank says of the window that it is about to make.
struct Window::Descriptions {
  struct Rank {
    std::string name;
    std::string layout; // "float32[3, 4]"
    std::vector<int> in;
    std::vector<int> out;
    uint64_t number = 0;
    std::string address;
  };
  std::vector<Rank> ranks;

  static std::string encode(const Rank& rank) {
    std::ostringstream text;
    const auto put = [&text](const std::string& field) { text << field.size() << ' ' << field; };
    const auto put_list = [&text](const std::vector<int>& list) {
      text << list.size() << ' ';
      for (const int entry : list) {
        text << entry << ' ';
      }
    };
    put(rank.name);
    put(rank.layout);
    put(rank.address);
    put_list(rank.in);
    put_list(rank.out);
    text << rank.number << ' ';
    return text.str();
  }

  static Descriptions decode(const std::string& all, int size) {
    std::istringstream text(all);
    const auto take = [&text] {
      size_t length = 0;
      text >> length;
      text.get();
      std::string field(length, '\0');
      text.read(field.data(), static_cast<std::streamsize>(length));
      return field;
    };
    const auto take_list = [&text] {
      size_t length = 0;
      text >> length;
      std::vector<int> list(length);
      for (int& entry : list) {
        text >> entry;
      }
      return list;
    };
    Descriptions descriptions;
    for (int rank = 0; rank < size; ++rank) {
      Rank next;
      next.name = take();
      next.layout = take();
      next.address = take();
      next.in = take_list();
      next.out = take_list();
      text >> next.number;
      text.get();
      descriptions.ranks.push_back(std::move(next));
    }
    TORCH_INTERNAL_ASSERT(text.good(), "fog: win_create: what the ranks say of the window cannot be read");
    return descriptions;
  }

  // Says the same on every rank.
  void check() const {
    const auto& first = ranks.front();
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      const auto& other = ranks[rank];
      const auto differ = [&](const char* what, const std::string& one, const std::string& two) {
        TORCH_CHECK_VALUE(
            one == two, "win_create: ranks disagree on the ", what, " of the window: rank 0 has ", one, ", rank ", rank, " has ", two);
      };
      differ("name", "'" + first.name + "'", "'" + other.name + "'");
      differ("tensor", first.layout, other.layout);
      differ("number", std::to_string(first.number), std::to_string(other.number));
    }
    for (size_t writer = 0; writer < ranks.size(); ++writer) {
      for (size_t owner = 0; owner < ranks.size(); ++owner) {
        const bool sends = contains(ranks[writer].out, static_cast<int>(owner));
        const bool receives = contains(ranks[owner].in, static_cast<int>(writer));
        TORCH_CHECK_VALUE(
            sends == receives, "win_create: ranks disagree on the neighbors of window '", first.name, "': rank ", owner, " is ",
            sends ? "" : "not ", "among the out_neighbors of rank ", writer, ", but rank ", writer, " is ", receives ? "" : "not ",
            "among the in_neighbors of rank ", owner);
      }
    }
  }
};

struct Window::Neighbor {
  int rank = 0;
  bool in = false;
  bool out = false;
  size_t door = 0; // for it in this rank's memory
  size_t slot = 0; // if it is an in-neighbor
  std::unique_ptr<ForeignWindow> view; // null: it is reached by messages
  size_t door_there = 0; // for this rank in its memory
  size_t slot_there = 0; // if it is an out-neighbor
  std::unique_ptr<RankMutex> mutex_here; // [this rank][it]
  std::unique_ptr<RankMutex> mutex_there; // [it][this rank]
  std::mutex writing; // held by the thread that acts as the writer of its slot
  std::atomic<bool> gone{false};
  std::atomic<bool> ended{false}; // its process
  std::string how; // it went; guarded by state_

  std::mutex queue_mutex;
  std::deque<Part> queue; // operations that wait for a mutex, and those behind them
  bool running = false; // a thread is at the queue
};

// One call, complete once all its parts are.
class Window::Call {
 public:
  Call(std::shared_ptr<Window> window, c10::intrusive_ptr<WorkFog> its_work) : work(std::move(its_work)), window_(std::move(window)) {
  }
  void expect() {
    pending_.fetch_add(1);
  }
  void finish(const std::exception_ptr& error) {
    if (error) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) {
        error_ = error;
      }
    }
    if (pending_.fetch_sub(1) == 1) {
      window_->end_call();
      work->complete(error_);
      mpi::Engine::instance().wake_waiters();
    }
  }

  const c10::intrusive_ptr<WorkFog> work;

 private:
  const std::shared_ptr<Window> window_;
  std::atomic<size_t> pending_{1};
  std::mutex mutex_;
  std::exception_ptr error_;
};

// The memory of this rank and of its neighbors stays.
class Window::Use {
 public:
  Use(Window& window, const char* op, For whom) : window_(window) {
    window_.begin_call(op, whom);
  }
  ~Use() {
    window_.end_call();
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  Window& window_;
};

struct Window::Part {
  WindowOp op;
  Neighbor* neighbor;
  double weight;
  std::optional<double> p;
  bool mutex;
  at::Tensor data;
  Milliseconds timeout;
  Deadline deadline;
  std::shared_ptr<Call> call;
};

// A pair's mutex in memory that this process has mapped.
class Window::MappedMutex final : public RankMutex {
 public:
  MappedMutex(const Window& window, const Neighbor& other, PairMutex& shared, PairMutex::Side side)
      : window_(window), other_(other), shared_(shared), side_(side) {}

 protected:
  bool acquire(Deadline deadline) override {
    return window_.acquire(shared_, side_, other_, deadline);
  }
  bool try_acquire() override {
    return shared_.try_lock(side_);
  }
  void release() override {
    if (!window_.left_) { // else leave() has done it
      shared_.unlock(side_);
    }
  }
  void time_out() override {
    const bool here = side_ == PairMutex::Side::kFirst;
    const int me = window_.group_->rank;
    window_.fail(
        "win_mutex", c10::str("timed out waiting for the mutex of owner ", here ? me : other_.rank, " and rank ", here ? other_.rank : me));
  }

 private:
  const Window& window_;
  const Neighbor& other_;
  PairMutex& shared_;
  const PairMutex::Side side_;
};

// One that this process can only ask for.
class Window::RemoteMutex final : public RankMutex {
 public:
  RemoteMutex(const Window& window, const Neighbor& owner) : window_(window), owner_(owner) {}

 protected:
  bool acquire(Deadline deadline) override {
    ask(WindowOp::kLock, deadline);
    return true;
  }
  bool try_acquire() override {
    return false;
  }
  void release() override {
    if (window_.left_) {
      return;
    }
    try {
      mpi::Engine::instance().tell(window_.group_, window_.number_, owner_.rank, WindowOp::kUnlock);
    } catch (const std::exception&) { // it has gone, and the mutex with it
    }
  }
  void time_out() override {
    window_.fail("win_mutex", c10::str("timed out waiting for the mutex of owner ", owner_.rank, " and rank ", window_.group_->rank));
  }

 private:
  void ask(WindowOp op, Deadline deadline) {
    auto& engine = mpi::Engine::instance();
    auto request = std::make_shared<mpi::WindowRequest>();
    request->group = window_.group_;
    request->window = window_.number_;
    request->peer = owner_.rank;
    request->op = op;
    request->what = c10::str(window_.describe("win_mutex"), ", mutex of owner ", owner_.rank);
    struct Answer {
      std::atomic<bool> done{false};
      std::exception_ptr error;
    };
    auto answer = std::make_shared<Answer>();
    request->done = [answer](std::exception_ptr error) {
      answer->error = std::move(error);
      answer->done = true;
    };
    engine.request(request, std::chrono::ceil<Milliseconds>(deadline - Clock::now()));
    try {
      engine.drive_until(answer->done, Deadline::max());
    } catch (...) { // interrupted
      engine.tell(window_.group_, window_.number_, owner_.rank, WindowOp::kUnlock);
      throw;
    }
    if (answer->error) {
      std::rethrow_exception(answer->error);
    }
  }

  const Window& window_;
  const Neighbor& owner_;
};

// --- its life ---

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
      bytes_(tensor_.nbytes()) {}

std::shared_ptr<Window> Window::create(
    const std::shared_ptr<mpi::Group>& group,
    at::Tensor tensor,
    const std::string& name,
    std::vector<int> in_neighbors,
    std::vector<int> out_neighbors,
    bool zero_init,
    Milliseconds timeout,
    const Gather& gather) {
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
  const auto all = all_of(in_neighbors, out_neighbors);
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
  window->number_ = mpi::Engine::instance().open_window(group, window);
  window->registered_ = true;
  Descriptions::Rank mine;
  mine.name = name;
  mine.layout = layout_of(window->tensor_);
  mine.in = window->in_neighbors_;
  mine.out = window->out_neighbors_;
  mine.number = window->number_;
  mine.address = window->memory_->address();
  const auto descriptions = Descriptions::decode(gather(Descriptions::encode(mine)), group->size());
  descriptions.check();
  window->connect(descriptions, gather);
  return window;
}

void Window::connect(const Descriptions& descriptions, const Gather& gather) {
  std::string by_messages(static_cast<size_t>(group_->size()), '0'); // whom this rank reaches so
  for (const auto& neighbor : neighbors_) {
    memory_->door(neighbor->door).used.store(1); // from the next gather on
    const auto& there = descriptions.ranks[neighbor->rank];
    neighbor->door_there = index_of(all_of(there.in, there.out), group_->rank);
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
  if (left_.exchange(true)) {
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
  const auto deadline = Clock::now() + timeout;
  {
    std::unique_lock<std::mutex> lock(state_);
    if (closed_) {
      return;
    }
    closed_reason_ = "was freed";
    closed_ = true;
    if (!idle_.wait_until(lock, deadline, [this] { return calls_ == 0; })) {
      fail(op, c10::str("timed out: its timeout of ", timeout.count(), " ms is over; operations of this rank in flight: ", calls_));
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
      fail(op, c10::str("timed out: its timeout of ", timeout.count(), " ms is over; not there: ", list_ranks(missing)));
    }
    shared_memory::futex_wait(leaves, seen, std::min<std::chrono::nanoseconds>(kLook, left));
  }
  bury();
}

// --- puts, accumulates, gets ---

c10::intrusive_ptr<c10d::Work> Window::put(const at::Tensor& tensor, const Peers& destinations, const Options& options) {
  return start(WindowOp::kPut, tensor, destinations, options);
}

c10::intrusive_ptr<c10d::Work> Window::accumulate(const at::Tensor& tensor, const Peers& destinations, const Options& options) {
  return start(WindowOp::kAccumulate, tensor, destinations, options);
}

c10::intrusive_ptr<c10d::Work> Window::get(const Peers& sources, const Options& options) {
  return start(WindowOp::kGet, at::Tensor(), sources, options);
}

WorkPtr Window::start(WindowOp op, const at::Tensor& tensor, const Peers& peers, const Options& options) {
  const char* name = name_of(op);
  const bool out = op != WindowOp::kGet;
  check_open(name);
  check_peers(name, out ? "destinations" : "sources", peers, out);
  at::Tensor data;
  if (out) {
    check_tensor(name, "tensor", tensor);
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == tensor_.scalar_type() && tensor.sizes() == tensor_.sizes(), name, ": tensor: got ",
        layout_of(tensor), "; allowed is ",
        layout_of(tensor_), " as window '", name_, "' has it");
    data = tensor.is_contiguous() ? tensor : flatten({tensor});
  }
  auto& engine = mpi::Engine::instance();
  const auto inputs = out ? std::vector<at::Tensor>{tensor} : std::vector<at::Tensor>();
  auto work = c10::make_intrusive<WorkFog>(
      engine, group_->rank, c10d::OpType::UNKNOWN, title_of(op), inputs, std::vector<at::Tensor>());
  work->set_describe([text = describe(name)] { return text; });
  begin_call(name, For::kThisRank);
  const auto call = std::make_shared<Call>(shared_from_this(), work);
  const double p = this->p();
  const auto deadline = Clock::now() + options.timeout;
  for (const auto& [rank, weight] : peers) {
    call->expect();
    auto& peer = neighbor(name, "", rank, !out, out);
    dispatch(
        {op, &peer, weight, options.with_p && out ? std::make_optional(weight * p) : std::nullopt, options.mutex, data, options.timeout, deadline, call},
        options.skip_lost);
  }
  call->finish(nullptr);
  return work;
}

void Window::dispatch(Part part, bool skip_lost) {
  auto& peer = *part.neighbor;
  const auto call = part.call;
  std::exception_ptr error;
  try {
    if (peer.gone) {
      if (!skip_lost) {
        fail(name_of(part.op), why_gone(peer));
      }
    } else if (!peer.view) {
      send(std::move(part));
      return; // its end finishes the part
    } else {
      std::unique_lock<std::mutex> lock(peer.queue_mutex);
      const bool first = !peer.running;
      const bool locked = first && part.mutex && peer.mutex_there->try_lock();
      if (!first || (part.mutex && !locked)) {
        peer.queue.push_back(std::move(part));
        if (first) {
          peer.running = true;
          mpi::Engine::instance().run_callbacks([self = shared_from_this(), &peer] { self->run_queue(peer); });
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

void Window::run_queue(Neighbor& peer) {
  while (true) {
    std::unique_lock<std::mutex> lock(peer.queue_mutex);
    if (peer.queue.empty()) {
      peer.running = false;
      return;
    }
    const auto part = std::move(peer.queue.front());
    peer.queue.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      if (part.mutex) {
        peer.mutex_there->lock(part.deadline);
      }
      try {
        execute(part);
      } catch (...) {
        error = std::current_exception();
      }
      if (part.mutex) {
        peer.mutex_there->unlock();
      }
    } catch (...) {
      error = std::current_exception();
    }
    part.call->finish(error);
  }
}

void Window::send(Part part) {
  auto request = std::make_shared<mpi::WindowRequest>();
  request->group = group_;
  request->window = number_;
  request->peer = part.neighbor->rank;
  request->op = part.op;
  request->weight = part.weight;
  request->p = part.p;
  request->mutex = part.mutex;
  request->data = part.data;
  request->what = c10::str(describe(name_of(part.op)), part.op == WindowOp::kGet ? " from" : " to", " rank ", part.neighbor->rank);
  if (part.op == WindowOp::kGet) {
    request->take = [self = shared_from_this(), &peer = *part.neighbor, weight = part.weight](const void* data) {
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
  mpi::Engine::instance().request(request, part.timeout);
}

void Window::execute(const Part& part) {
  auto& peer = *part.neighbor;
  if (part.op == WindowOp::kGet) {
    fetch(peer, part.weight, part.deadline);
    return;
  }
  const std::lock_guard<std::mutex> writing(peer.writing);
  write(*peer.view, peer.slot_there, part.op, part.weight, part.p, part.data.const_data_ptr());
}

void Window::write(const WindowView& view, size_t slot, WindowOp op, double weight, std::optional<double> p, const void* data) {
  auto& place = view.slot(slot);
  if (op == WindowOp::kPut) {
    const unsigned buffer = place.slot.writers_buffer();
    scale(view.buffer(place, buffer), data, weight);
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
      scale(out, data, weight);
    } else if (weight == 0) {
      scale(out, sum, 1.0);
    } else {
      linear_combination(tensor_.scalar_type(), out, {sum, data}, {1.0, weight}, static_cast<size_t>(tensor_.numel()));
    }
    if (place.slot.add(buffer, base.p + p.value_or(0.0), base)) {
      return;
    }
  }
}

void Window::fetch(Neighbor& source, double weight, Deadline deadline) {
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
    std::atomic_thread_fence(std::memory_order_acquire);
    whole = changes.load(std::memory_order_relaxed) == before;
  }
  if (!whole) {
    auto& mutex = source.view->door(source.door_there).tensor;
    if (!acquire(mutex, PairMutex::Side::kSecond, source, deadline)) {
      fail("win_get", c10::str("timed out waiting for rank ", source.rank, " to end its update"));
    }
    copy();
    mutex.unlock(PairMutex::Side::kSecond);
  }
  place.slot.replace(buffer);
}

// --- the owner ---

void Window::change_tensor(Deadline deadline, const std::function<void()>& change) {
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
      if (!acquire(mutex, PairMutex::Side::kFirst, *neighbor, deadline)) {
        fail("win_update", c10::str("timed out waiting for rank ", neighbor->rank, ", which reads the tensor"));
      }
      held.mutexes.push_back(&mutex);
    }
  }
  auto& changes = memory_->label().changes;
  changes.fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst); // before what follows
  change();
  changes.fetch_add(1, std::memory_order_release);
}

bool Window::acquire(PairMutex& mutex, PairMutex::Side side, const Neighbor& neighbor, Deadline deadline) const {
  if (mutex.lock_or_queue(side)) {
    return true;
  }
  while (!mutex.wait(side, std::min<std::chrono::nanoseconds>(kLook, deadline - Clock::now()))) {
    if (neighbor.ended) {
      mutex.seize(side);
      return true;
    }
    if (abandoned_ || Clock::now() >= deadline) {
      if (!mutex.give_up(side)) {
        return true;
      }
      if (abandoned_) {
        check_open("win_mutex");
      }
      return false;
    }
  }
  return true;
}

void Window::scale(void* out, const void* data, double weight) const {
  const auto dtype = tensor_.scalar_type();
  const auto numel = static_cast<size_t>(tensor_.numel());
  if (weight == 0) {
    linear_combination(dtype, out, {}, {}, numel);
  } else {
    linear_combination(dtype, out, data, weight, numel);
  }
}

at::Tensor Window::update(double self_weight, const Peers& neighbors, bool reset, bool clone, const Options& options) {
  constexpr const char* op = "win_update";
  const Use use(*this, op, For::kThisRank);
  check_peers(op, "neighbors", neighbors, false);
  TORCH_CHECK_VALUE(std::isfinite(self_weight), op, ": self_weight: got ", self_weight, "; allowed are finite numbers");
  check_tensor_in_place(op);
  const auto deadline = Clock::now() + options.timeout;
  std::vector<int> locked;
  for (const auto& peer : neighbors) {
    if (options.mutex) {
      locked.push_back(peer.first);
    }
  }
  lock(locked, true, options.timeout);
  struct Unlock {
    Window& window;
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
    linear_combination(tensor_.scalar_type(), result.mutable_data_ptr(), inputs, weights, static_cast<size_t>(tensor_.numel()));
    for (auto* slot : pinned) {
      slot->unpin();
    }
    if (options.with_p) {
      const std::lock_guard<std::mutex> lock(p_mutex_);
      p_ = self_weight * p_ + p;
    }
    for (size_t i = 0; i < in_neighbors_.size(); ++i) {
      memory_->slot(i).slot.reset_version();
    }
  };
  if (clone) {
    combine();
  } else {
    change_tensor(deadline, combine);
  }
  return result;
}

int64_t Window::version(int rank) {
  constexpr const char* op = "get_win_version";
  const Use use(*this, op, For::kThisRank);
  return memory_->slot(neighbor(op, "rank", rank, true, false).slot).slot.version();
}

double Window::p() const {
  const std::lock_guard<std::mutex> lock(p_mutex_);
  return p_;
}

void Window::set_p(double p) {
  const std::lock_guard<std::mutex> lock(p_mutex_);
  p_ = p;
}

// --- mutexes ---

std::vector<RankMutex*> Window::mutexes(const char* op, std::vector<int> ranks, bool own) const {
  std::sort(ranks.begin(), ranks.end()); // by owner, then by the other
  std::vector<RankMutex*> mutexes;
  for (const int rank : ranks) {
    auto& other = neighbor(op, "ranks", rank, true, true);
    mutexes.push_back(own ? other.mutex_here.get() : other.mutex_there.get());
  }
  return mutexes;
}

void Window::lock(std::vector<int> ranks, bool own, Milliseconds timeout) {
  constexpr const char* op = "win_mutex";
  const Use use(*this, op, For::kThisRank);
  const auto deadline = Clock::now() + timeout;
  std::vector<RankMutex*> held;
  try {
    for (auto* mutex : mutexes(op, std::move(ranks), own)) {
      mutex->lock(deadline);
      held.push_back(mutex);
    }
  } catch (...) {
    for (auto* mutex : held) {
      mutex->unlock();
    }
    throw;
  }
}

void Window::unlock(std::vector<int> ranks, bool own) {
  const auto held = mutexes("win_mutex", std::move(ranks), own);
  const bool all = std::all_of(held.begin(), held.end(), [](RankMutex* mutex) { return mutex->held_here(); });
  TORCH_CHECK_VALUE(all, "win_mutex: ranks: got some whose mutex of window '", name_, "' this thread has not locked");
  for (auto* mutex : held) {
    mutex->unlock();
  }
}

// --- checks ---

Window::Neighbor& Window::neighbor(const char* op, const char* argument, int rank, bool in, bool out) const {
  for (const auto& neighbor : neighbors_) {
    if (neighbor->rank == rank && ((in && neighbor->in) || (out && neighbor->out))) {
      return *neighbor;
    }
  }
  const auto allowed = in && out ? all_of(in_neighbors_, out_neighbors_) : in ? in_neighbors_ : out_neighbors_;
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

void Window::check_tensor_in_place(const char* op) const {
  TORCH_CHECK_VALUE(
      tensor_.has_storage() && tensor_.const_data_ptr() == reinterpret_cast<const void*>(memory_->label().tensor) && tensor_.nbytes() == bytes_,
      op, ": the tensor of window '", name_, "' has other memory than when the window was made (was its .data assigned, or its size changed?)");
}

std::string Window::describe(const char* op) const {
  return c10::str(op, " of window '", name_, "' of group '", group_->name, "' on rank ", group_->rank);
}

std::string Window::why_gone(const Neighbor& neighbor) const {
  const std::lock_guard<std::mutex> lock(state_);
  return group_->describe_member(neighbor.rank) + ' ' + neighbor.how;
}

void Window::fail(const char* op, const std::string& reason) const {
  C10_THROW_ERROR(DistBackendError, "fog: " + describe(op) + ": " + reason);
}

// --- for the engine ---

void Window::apply(int source, WindowOp op, double weight, std::optional<double> p, const void* data) {
  const char* name = name_of(op);
  const Use use(*this, name, For::kNeighbor);
  auto& peer = neighbor(name, "source", source, true, false);
  const std::lock_guard<std::mutex> writing(peer.writing);
  write(*memory_, peer.slot, op, weight, p, data);
}

void Window::read(void* out) {
  const Use use(*this, "win_get", For::kNeighbor);
  const std::lock_guard<std::mutex> owner(owner_);
  std::memcpy(out, reinterpret_cast<const void*>(memory_->label().tensor), bytes_);
}

PairMutex& Window::mutex(int source) {
  return memory_->door(neighbor("win_mutex", "source", source, true, true).door).mutex;
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
