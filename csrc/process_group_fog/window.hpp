// One-sided windows: ranks write into memory of their neighbors, and read it, while these do something else.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "mpi/group.hpp"
#include "mpi/window_endpoint.hpp"
#include "mpi/window_service.hpp"
#include "rank_mutex.hpp"
#include "shared_memory/window_memory.hpp"
#include "window_descriptions.hpp"
#include "work.hpp"

namespace fog {

// A tensor of each rank of a group, and beside it a slot for each in-neighbor, into which that one puts or accumulates and
// into which this rank gets the neighbor's tensor.
//
// On one host the origin copies, or adds, straight into the slot: the target takes no part, and no message is sent. Between
// hosts the target's engine does it (WindowService). A slot is never seen half written, see Slot; a tensor is never seen half
// updated by update(), but the owner's own arithmetic on it is seen as it goes on, unless both sides use the mutex.
//
// What fails because of one peer fails alone: the group goes on. Any thread may call; the GIL is not needed.
class Window final : public mpi::WindowEndpoint, public std::enable_shared_from_this<Window> {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using Peers = std::vector<std::pair<int, double>>; // ranks with weights
  struct Options {
    bool with_p = false; // p goes along
    bool mutex = false; // each pair's mutex is held meanwhile
    bool skip_lost = false; // ranks that are gone are left out instead of failing the Work
    Milliseconds timeout{0};
    double self_weight = 1.0; // of put and accumulate: what the origin keeps
  };
  // Gathers all ranks' bytes, one after the other.
  using Gather = std::function<std::string(const std::string& mine)>;

  // Collective. Throws ValueError on every rank if they disagree.
  static std::shared_ptr<Window> create(
      const std::shared_ptr<mpi::Group>& group,
      const at::Tensor& tensor,
      const std::string& name,
      const std::vector<int>& in_neighbors,
      const std::vector<int>& out_neighbors,
      bool zero_init,
      Milliseconds timeout,
      const Gather& gather);
  ~Window() override;
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Slot [destination][this rank] becomes weight * tensor, or grows by that; p as well, by weight * p() of now. Complete on return, but for
  // destinations on other hosts or whose mutex has to be waited for: until then the tensor must not change. Before it is complete, and only if
  // nothing has failed, the tensor and p() are multiplied by `self_weight`: the tensor itself, which need not be contiguous.
  c10::intrusive_ptr<c10d::Work> put(const at::Tensor& tensor, const Peers& destinations, const Options& options);
  c10::intrusive_ptr<c10d::Work> accumulate(const at::Tensor& tensor, const Peers& destinations, const Options& options);
  // Slot [this rank][source] becomes weight * the source's tensor.
  c10::intrusive_ptr<c10d::Work> get(const Peers& sources, const Options& options);
  // self_weight * tensor + the weighted sum of the neighbors' slots, in the window's tensor or, with `clone`, in a new one.
  // With `reset` these slots are zeros from then on; what is taken is what is in the sum, whatever comes meanwhile. All versions
  // count from 0 again.
  at::Tensor update(double self_weight, const Peers& neighbors, bool reset, bool clone, const Options& options);

  // --- what c10d::Window has besides ---
  // Into the destination's tensor itself, from element `offset` on: no slot, nothing is kept from being torn. signal() says
  // when it is there: of one rank to another, signals come after what was written before.
  c10::intrusive_ptr<c10d::Work> write(const at::Tensor& tensor, int destination, int64_t offset, const Options& options);
  c10::intrusive_ptr<c10d::Work> signal(int destination, const Options& options);
  // Takes one signal of this source, or waits for it.
  c10::intrusive_ptr<c10d::Work> wait_signal(int source, const Options& options);
  // A neighbor's tensor where it is; undefined if this process has not mapped it. The window lives as long.
  at::Tensor map_remote(int neighbor);

  // Puts and gets into slot [this rank][neighbor] since the last update.
  int64_t version(int neighbor);
  double p() const;
  void set_p(double p);

  // The mutexes [rank][this rank] of these ranks, or [this rank][rank] if `own`; of all that there are, in one order, so that no two
  // calls block each other. A thread that has one may take it again. DistBackendError at the time-out, with none taken.
  void lock(std::vector<int> ranks, bool own, Milliseconds timeout);
  void unlock(std::vector<int> ranks, bool own);
  // The same until the end of what it returns.
  class Hold;
  std::unique_ptr<Hold> hold(std::vector<int> ranks, bool own, Milliseconds timeout);

  // Waits for what is in flight and for the neighbors to call it too; then nobody uses this rank's memory.
  void free(Milliseconds timeout);

  const at::Tensor& tensor() const {
    return tensor_;
  }
  // Of operations for which the caller says nothing else.
  Milliseconds timeout() const {
    return timeout_;
  }
  const std::string& name() const {
    return name_;
  }
  const std::vector<int>& in_neighbors() const {
    return in_neighbors_;
  }
  const std::vector<int>& out_neighbors() const {
    return out_neighbors_;
  }

  // --- WindowEndpoint ---
  size_t bytes() const override {
    return bytes_;
  }
  void apply(int source, mpi::WindowOp op, double weight, std::optional<double> p, const void* data, size_t bytes) override;
  void read(void* out) override;
  void write(int source, size_t offset, const void* data, size_t bytes) override;
  void on_group_closed() override;
  shared_memory::PairMutex& mutex(int source) override;
  void on_signal(int source) override;
  void on_left(int source) override;
  void on_gone(int peer, const std::string& how) override;

 private:
  class Call;
  class MappedMutex;
  class RemoteMutex;
  class Use;
  struct Part;
  struct Neighbor;
  using Deadline = std::chrono::steady_clock::time_point;

  Window(
      const std::shared_ptr<mpi::Group>& group,
      at::Tensor tensor,
      std::string name,
      std::vector<int> in_neighbors,
      std::vector<int> out_neighbors,
      Milliseconds timeout);

  // What needs no other rank.
  static std::shared_ptr<Window> prepare(
      const std::shared_ptr<mpi::Group>& group,
      at::Tensor tensor,
      const std::string& name,
      std::vector<int> in_neighbors,
      std::vector<int> out_neighbors,
      bool zero_init,
      Milliseconds timeout);
  void connect(const std::vector<WindowDescription>& descriptions, const Gather& gather);
  c10::intrusive_ptr<c10d::Work> start(mpi::WindowOp op, const at::Tensor& tensor, const Peers& peers, const Options& options);
  std::shared_ptr<Call> begin(mpi::WindowOp op, const std::vector<at::Tensor>& inputs);
  void dispatch(Part part, bool skip_lost);
  void send(Part part);
  void run_queue(Neighbor& neighbor);
  // Runs the first of the queue, or ends it with `error` if it is one of the call that `failed`; `locked`: this thread has the
  // mutex. False if there is nothing (else) to run.
  bool run_first(Neighbor& neighbor, bool locked, const Call* failed, std::exception_ptr error);
  void execute(const Part& part);
  // In the slot of `view`, as its writer.
  void write_slot(
      const shared_memory::WindowView& view, size_t slot, mpi::WindowOp op, double weight, std::optional<double> p, const void* data);
  // The neighbor's tensor, in this rank's slot for it.
  void fetch(Neighbor& neighbor, double weight, Deadline deadline);
  // Takes a mutex that the neighbor holds, or seizes it if its process has ended; false at the deadline.
  bool acquire(shared_memory::PairMutex& mutex, shared_memory::PairMutex::Side side, const Neighbor& neighbor, Deadline deadline) const;
  // weight * data; zeros if the weight is 0, whatever the data. `others_read`: see linear_combination().
  void scale(void* out, const void* data, double weight, bool others_read = false) const;
  bool take_signal(const Neighbor& source, Deadline deadline);
  // Multiplies what was sent, whose values in order are `data`, and p, which was `p` then, by what this rank keeps.
  void keep(const char* op, const at::Tensor& tensor, const at::Tensor& data, double p, const Options& options, Deadline deadline);
  // With the mutexes that keep neighbors from reading the tensor while `change` changes it.
  void change_tensor(Deadline deadline, const std::function<void()>& change);
  // For autograd.
  static void count_change(const at::Tensor& tensor);

  Neighbor& neighbor(const char* op, const char* argument, int rank, bool in, bool out) const;
  std::vector<RankMutex*> mutexes(const char* op, std::vector<int> ranks, bool own) const;
  void check_peers(const char* op, const char* argument, const Peers& peers, bool out) const;
  void check_open(const char* op) const;
  void check_abandoned(const char* op) const;
  void check_tensor_in_place(const char* op) const;
  std::string describe(const char* op) const;
  std::exception_ptr failure(const char* op, const std::string& reason) const;
  [[noreturn]] void fail(const char* op, const std::string& reason) const;
  std::string why_gone(const Neighbor& neighbor) const;

  // Around all that uses a neighbor's memory, or serves a neighbor in this rank's: in free() this rank calls nothing any
  // more, but serves those who do not call it yet. Throws if the window is closed.
  enum class For { kThisRank, kNeighbor };
  void begin_call(const char* op, For whom);
  void end_call();
  // Refuses new calls.
  void close(const std::string& reason);
  void leave();
  void bury();

  const std::shared_ptr<mpi::Group> group_;
  const at::Tensor tensor_;
  const c10::Storage storage_; // the tensor's, whatever becomes of the tensor
  const std::string name_;
  const std::vector<int> in_neighbors_;
  const std::vector<int> out_neighbors_;
  const Milliseconds timeout_;
  // As it was made: the program may give the tensor other memory, or another dtype.
  const c10::ScalarType dtype_;
  const int64_t numel_;
  const std::string layout_;
  const size_t bytes_;
  std::unique_ptr<shared_memory::WindowMemory> memory_;
  uint64_t number_ = 0;
  std::vector<std::unique_ptr<Neighbor>> neighbors_; // in and out, by rank

  mutable std::mutex owner_; // held by the thread that acts as the owner of the slots and changes or reads the tensor
  mutable std::mutex p_mutex_;
  double p_ = 1.0;

  mutable std::mutex state_;
  std::condition_variable idle_;
  size_t calls_ = 0; // in flight
  std::string closed_reason_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> abandoned_{false}; // closed without free(), which leaves by itself
  mutable std::mutex leaving_;
  std::atomic<bool> left_{false};
  bool registered_ = false;
};

class Window::Hold {
 public:
  Hold(std::shared_ptr<Window> window, std::vector<int> ranks, bool own) : window_(std::move(window)), ranks_(std::move(ranks)), own_(own) {}
  ~Hold() {
    release();
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  // In the thread that made it.
  void release() {
    if (const auto window = std::exchange(window_, nullptr)) {
      window->unlock(ranks_, own_);
    }
  }

 private:
  std::shared_ptr<Window> window_;
  const std::vector<int> ranks_;
  const bool own_;
};

} // namespace fog
