// One-sided windows: ranks write into memory of their neighbors, and read it, while these do something else.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "core/deadline.hpp"
#include "engine/group.hpp"
#include "windows/pair_mutex.hpp"
#include "windows/rank_mutex.hpp"
#include "windows/slot_values.hpp"
#include "windows/window_descriptions.hpp"
#include "windows/window_memory.hpp"
#include "windows/window_staging.hpp"

namespace fog {

// This is what a window is made of.
struct WindowConfig {
  std::shared_ptr<Group> group;
  at::Tensor tensor;
  std::string name;
  std::vector<int> in_neighbors;
  std::vector<int> out_neighbors;
  bool zero_init = false;
  std::chrono::milliseconds timeout{0};
};

// A tensor of each rank of a group, and beside it a slot for each in-neighbor, into which that one puts or accumulates and
// into which this rank gets the neighbor's tensor.
//
// Slots, versions, p, mutexes and the end of a window are here, once. How an operation reaches a neighbor is a matter of its Leg: on one
// host the origin copies, or adds, straight into the slot, the target takes no part, and no message is sent; between hosts the target's
// engine does it (WindowService). What waits for nothing is complete on return. A tensor of a device has a copy on the host beside it, in
// whose place it is for all of this; the WindowStaging copies between the two.
//
// A slot is never seen half written, and a tensor never half updated by update(), but the owner's own arithmetic on it is seen as it goes
// on, unless both sides use the mutex. Operations of one rank on one neighbor are done in the order of their calls. What fails because of
// one peer fails alone: the group goes on. Any thread may call; the GIL is not needed.
class Window final : public std::enable_shared_from_this<Window> {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using Peers = std::vector<std::pair<int, double>>; // ranks with weights
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  struct Options {
    bool with_p = false; // p goes along
    bool mutex = false; // each pair's mutex is held meanwhile
    bool skip_lost = false; // ranks that are gone are left out instead of failing the Work
    Milliseconds timeout{0};
    double self_weight = 1.0; // of put and accumulate: what the origin keeps
  };
  // Gathers all ranks' bytes, one after the other.
  using Gather = std::function<std::string(const std::string& mine)>;
  using StagingFactory = std::function<std::unique_ptr<WindowStaging>(Window& window)>;

  // All ranks of the group call it; it throws ValueError on every rank if they disagree. `make_staging` is for a tensor of a device.
  static std::shared_ptr<Window> create(WindowConfig config, const Gather& gather, const StagingFactory& make_staging = nullptr);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Slot [destination][this rank] becomes weight * tensor, or grows by that; p as well, by weight * p() of now. Until the Work is
  // complete the tensor must not change. Before it is, and only if nothing has failed, the tensor and p() are multiplied by
  // `self_weight`: the tensor itself, which need not be contiguous.
  WorkPtr put(const at::Tensor& tensor, const Peers& destinations, const Options& options);
  WorkPtr accumulate(const at::Tensor& tensor, const Peers& destinations, const Options& options);
  // Slot [this rank][source] becomes weight * the source's tensor.
  WorkPtr get(const Peers& sources, const Options& options);
  // self_weight * tensor + the weighted sum of the neighbors' slots, in the window's tensor or, with `clone`, in a new one.
  // With `reset` these slots are zeros from then on; what is taken is what is in the sum, whatever comes meanwhile. All versions
  // count from 0 again.
  at::Tensor update(double self_weight, const Peers& neighbors, bool reset, bool clone, const Options& options);

  // --- what c10d::Window has besides ---
  // Into the destination's tensor itself, from element `offset` on: no slot, nothing is kept from being torn. signal() says
  // when it is there: of one rank to another, signals come after what was written before.
  WorkPtr write(const at::Tensor& tensor, int destination, int64_t offset, const Options& options);
  WorkPtr signal(int destination, const Options& options);
  // Takes one signal of this source, or waits for it.
  WorkPtr wait_signal(int source, const Options& options);
  // A neighbor's tensor where it is; undefined if this process has not mapped it. The window lives as long.
  at::Tensor map_remote(int neighbor);

  // Puts and gets into slot [this rank][neighbor] since the last update.
  int64_t version(int neighbor);
  // The p that came with what is in that slot, or with what was there before, if it was changed without p.
  double slot_p(int neighbor);
  // Whether this neighbor takes no further part: its process has ended, or it has closed the group.
  bool is_gone(int neighbor) const;
  double p();
  void set_p(double p);

  // The mutexes [rank][this rank] of these ranks, or [this rank][rank] if `own`; of all that there are, in one order, so that no two
  // calls block each other. A thread that has one may take it again. DistBackendError at the time-out, with none taken.
  void lock(const std::vector<int>& ranks, bool own, Milliseconds timeout);
  void unlock(const std::vector<int>& ranks, bool own);
  // The same until the end of what it returns.
  class Hold;
  std::unique_ptr<Hold> hold(std::vector<int> ranks, bool own, Milliseconds timeout);

  // Waits for what is in flight and for the neighbors to call it too; then nobody uses this rank's memory.
  void free(Milliseconds timeout);

  // How this rank's operations reach its neighbors: of CPU tensors "shared memory", "rma" and "messages", those of them that there are, with
  // " and " between; "staged" of devices'.
  std::string transport() const;
  // How they reach this one: a single word of these, or "staged", "staged, by rma" or "staged, by messages".
  std::string transport_to(int neighbor) const;

  const at::Tensor& tensor() const {
    return tensor_;
  }
  // Of operations for which the caller says nothing else.
  Milliseconds timeout() const {
    return timeout_;
  }
  Engine& engine() const {
    return group_->engine;
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

  // --- for its WindowStaging ---
  // Neighbors get this, and write to it: it is the tensor itself, or its copy on the host.
  const at::Tensor& host_tensor() const {
    return host_;
  }
  // This runs `change`, which changes that: whoever gets it sees it as it was before or as it is afterwards.
  void publish(const std::function<void()>& change);
  // This says whether the calling thread holds a mutex of the window.
  bool holds_mutex() const;
  std::string describe(const char* op) const;
  [[noreturn]] void fail(const char* op, const std::string& reason) const; // DistBackendError
  // Autograd has to know of a change.
  static void count_change(const at::Tensor& tensor);

  // --- for the WindowService, which serves one source's operations one after the other ---
  size_t bytes() const {
    return values_.bytes;
  }
  bool is_neighbor(int rank) const; // no other rank may ask for anything
  bool is_in(const c10::Storage& storage) const; // its tensor, or its copy on the host
  // kPut or kAccumulate of weight * data, and of p if it comes along, in the slot of `source`, which had made so many `puts` into its mailbox
  // before.
  void apply(int source, WindowOp op, double weight, std::optional<double> p, uint64_t puts, const void* data, size_t bytes);
  // kWrite: into the tensor, from byte `offset` on.
  void receive(size_t offset, const void* data, size_t bytes);
  // kGet: copies the tensor.
  void read(void* out);
  // The group is closed: no operation may begin.
  void on_group_closed();
  // These are called with the engine's lock, the last by any thread. The first is the mutex of this rank and `source`, for which the engine
  // stands as the second side; the last: `source` takes no further part.
  PairMutex& mutex(int source);
  void on_signal(int source);
  void on_gone(int source, const std::string& how);

 private:
  class Call;
  class Leg;
  class DirectLeg;
  class MappedLeg;
  class RemoteLeg;
  class MessageLeg;
  class Use;
  struct Neighbor;
  struct Part;

  Window(WindowConfig config, at::Tensor host);

  // It throws ValueError unless this rank can make a window of that.
  static void check_config(const WindowConfig& config);
  // The first does what needs no other rank, the second the rest.
  static std::shared_ptr<Window> prepare(WindowConfig config, const StagingFactory& make_staging);
  void connect(const std::vector<WindowDescription>& descriptions, const Gather& gather);

  // All that is asked of neighbors begins here. The tensor goes to the host first if it has to; launch() sends it on its way from there.
  WorkPtr start(WindowOp op, const at::Tensor& tensor, const Peers& peers, const Options& options, size_t offset = 0);
  std::shared_ptr<Call> begin(WindowOp op, const at::Tensor& tensor, Milliseconds timeout);
  void launch(
      const std::shared_ptr<Call>& call, const at::Tensor& data, const Peers& peers, const Options& options, double p, size_t offset);
  void dispatch(Neighbor& peer, Part part, bool skip_lost);
  // It multiplies what was sent, whose values in order are `data`, and p, which was `p` then, by what this rank keeps.
  void keep(const Call& call, const at::Tensor& data, double p, const Options& options);
  bool take_signal(const Neighbor& source, Deadline deadline);
  [[noreturn]] void refused(const char* op, const std::exception& refusal) const;

  // These are the owner's part of the slots. `copy` writes the value that the slot is to have, or returns false: then it stays, and so
  // does the first.
  bool replace_slot(const Neighbor& source, const std::function<bool(void* out)>& copy);
  at::Tensor combine(double self_weight, const Peers& neighbors, bool reset, bool clone, bool with_p, Deadline deadline);
  // It holds the mutexes that keep neighbors from reading the tensor while `change` changes it.
  void change_tensor(Deadline deadline, const std::function<void()>& change);

  std::unique_ptr<RankMutex> make_mutex(RankMutex::Other other) const;
  // This is how a rank, which is `side`, gets a mutex in memory that it has mapped.
  RankMutex::Other word_of(PairMutex& word, PairMutex::Side side, const Neighbor& other) const;
  // It takes a mutex that the neighbor holds, or seizes it if its process has ended; it returns false at the deadline.
  bool acquire(PairMutex& mutex, PairMutex::Side side, const Neighbor& neighbor, Deadline deadline) const;
  void lock(RankMutex& mutex, int owner, int other, Deadline deadline) const;
  void release(const std::vector<int>& ranks, bool own);
  std::vector<RankMutex*> mutexes(const std::vector<int>& ranks, bool own) const;

  // --- these throw ValueError ---
  Neighbor& neighbor(const char* op, const char* argument, int rank, bool in, bool out) const;
  void check_peers(const char* op, const char* argument, const Peers& peers, bool out) const;
  // `tensor` is what put() and accumulate() take.
  void check_input(const char* op, const at::Tensor& tensor, double self_weight) const;
  // `tensor` fits from element `offset` on.
  void check_written(const char* op, const at::Tensor& tensor, int64_t offset) const;
  void check_self_weight(const char* op, double self_weight) const;
  void check_tensor_in_place(const char* op) const;
  bool is_tensor_in_place() const;

  // --- these throw DistBackendError ---
  void check_open(const char* op) const;
  void check_abandoned(const char* op) const;
  std::exception_ptr failure(const char* op, const std::string& reason) const;
  std::string why_gone(const Neighbor& neighbor) const;

  // Around all that uses a neighbor's memory, or serves a neighbor in this rank's: in free() this rank calls nothing any
  // more, but serves those who do not call it yet. Throws if the window is closed.
  enum class For { kThisRank, kNeighbor };
  void begin_call(const char* op, For whom);
  void end_call();
  // From then on new calls are refused.
  void close(const std::string& reason);
  void leave();
  // It gives the memory back, now or once no neighbor uses it any more.
  void release_memory();

  const std::shared_ptr<Group> group_;
  const at::Tensor tensor_;
  const at::Tensor host_;
  const c10::Storage storage_; // that of host_, whatever becomes of the tensor
  const std::string name_;
  const std::vector<int> in_neighbors_;
  const std::vector<int> out_neighbors_;
  const Milliseconds timeout_;
  // As it was made: the program may give the tensor other memory, or another dtype.
  const at::Device device_;
  const SlotValues values_;
  const std::string layout_;
  const void* const data_;
  std::unique_ptr<WindowStaging> staging_; // null: the tensor is on the CPU

  std::shared_ptr<WindowMemory> memory_;
  uint64_t number_ = 0;
  std::vector<std::unique_ptr<Neighbor>> neighbors_; // in and out, by rank

  std::mutex owner_; // held by the thread that acts as the owner of the slots and changes or reads the tensor
  std::mutex p_mutex_;
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
  Hold(std::shared_ptr<Window> window, std::vector<int> ranks, bool own)
      : window_(std::move(window)), ranks_(std::move(ranks)), own_(own) {}
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
