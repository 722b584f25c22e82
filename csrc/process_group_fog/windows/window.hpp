// One-sided windows: ranks write to and read from the memory of their neighbors while these do other work.
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
#include "windows/slot_values.hpp"
#include "windows/window_descriptions.hpp"
#include "windows/window_memory.hpp"
#include "windows/window_staging.hpp"

namespace fog {

// The parameters of a window.
struct WindowConfig {
  std::shared_ptr<Group> group;
  at::Tensor tensor;
  std::string name;
  std::vector<int> in_neighbors;
  std::vector<int> out_neighbors;
  bool zero_init = false;
  std::chrono::milliseconds timeout{0};
};

// A tensor of each rank of a group, and beside it a slot for each in-neighbor. The in-neighbor puts or accumulates into
// its slot, and this rank gets the neighbor's tensor into it.
//
// This class implements slots, versions, p, mutexes and the end of a window once for all transports. A Leg carries an
// operation to a neighbor. On one host the origin copies or adds directly into the slot: the target takes no part, and
// no message is sent. Between hosts the target's engine does it (WindowService). Operations that wait for nothing are
// complete on return. A tensor on a device has a copy on the host, which stands for the tensor in all of this;
// WindowStaging copies between the two.
//
// A reader never sees a partially written slot, or a tensor in the middle of an update(). It does see the owner's own
// arithmetic on the tensor in progress, unless both sides use the mutex. Operations of one rank on one neighbor are
// done in the order of the calls. A failure because of one peer affects only the operations with that peer: the group
// continues. Any thread may call; the GIL is not needed.
class Window final : public std::enable_shared_from_this<Window> {
 public:
  using Milliseconds = std::chrono::milliseconds;
  using Peers = std::vector<std::pair<int, double>>; // ranks with weights
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  struct Options {
    bool with_p = false; // send p too
    bool mutex = false; // hold each pair's mutex during the operation
    bool skip_lost = false; // skip ranks that have gone, instead of failing the Work
    Milliseconds timeout{0};
    double self_weight = 1.0; // for put and accumulate: the factor for the origin's own tensor
    bool waits = false; // the caller waits for the Work next
  };
  // Gathers all ranks' bytes, one after the other.
  using Gather = std::function<std::string(const std::string& mine)>;
  using StagingFactory = std::function<std::unique_ptr<WindowStaging>(Window& window)>;

  // Called by all ranks of the group; throws ValueError on every rank if they disagree. `make_staging` is for a tensor
  // on a device.
  static std::shared_ptr<Window> create(WindowConfig config, const Gather& gather, const StagingFactory& make_staging = nullptr);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Sets slot [destination][this rank] to weight * tensor, or adds it; also p, with weight * the current p(). Until the
  // Work is complete the tensor must not change. If nothing has failed, the tensor itself, which may be non-contiguous,
  // and p() are multiplied by `self_weight` before the Work completes.
  WorkPtr put(const at::Tensor& tensor, const Peers& destinations, const Options& options);
  WorkPtr accumulate(const at::Tensor& tensor, const Peers& destinations, const Options& options);
  // Sets slot [this rank][source] to weight * the source's tensor.
  WorkPtr get(const Peers& sources, const Options& options);
  // Computes self_weight * tensor + the weighted sum of the neighbors' slots, in the window's tensor or, with `clone`,
  // in a new tensor. With `reset` these slots are zero from then on; exactly the summed values are removed, even if
  // more values arrive meanwhile. All versions restart at 0.
  at::Tensor update(double self_weight, const Peers& neighbors, bool reset, bool clone, const Options& options);

  // --- the operations that only c10d::Window has ---
  // Writes into the destination's tensor itself, from element `offset` on: there is no slot, and readers may see a
  // partial write. signal() tells when the data is there: the signals of one rank to another come after its earlier
  // writes.
  WorkPtr write(const at::Tensor& tensor, int destination, int64_t offset, const Options& options);
  WorkPtr signal(int destination, const Options& options);
  // Takes a signal of this source, or waits for it.
  WorkPtr wait_signal(int source, const Options& options);
  // A neighbor's tensor in place; undefined if this process has not mapped it. Keeps the window alive.
  at::Tensor map_remote(int neighbor);

  // The number of puts and gets into slot [this rank][neighbor] since the last update.
  int64_t version(int neighbor);
  // The p that came with the slot's value, or the previous p if the value was changed without p.
  double slot_p(int neighbor);
  // Returns whether this neighbor takes no further part: its process has ended, or it has closed the group.
  bool is_gone(int neighbor) const;
  double p();
  void set_p(double p);

  // Locks the mutexes [rank][this rank] of these ranks, or [this rank][rank] if `own`, until the returned object is
  // destroyed. Every call locks in the same order, so two calls cannot deadlock. A thread may lock a mutex again that it
  // holds. Throws DistBackendError at the timeout, with no mutex locked. With `own` and `publish`, neighbors that get the
  // tensor later see the changes that were made under the mutexes.
  class Hold;
  std::unique_ptr<Hold> hold(std::vector<int> ranks, bool own, Milliseconds timeout, bool publish = true);

  // Waits for operations in flight and for the neighbors to call it too; afterwards no rank uses this rank's memory.
  void free(Milliseconds timeout);

  // How this rank's operations reach its neighbors: for a CPU tensor the used ones of "shared memory", "rma" and
  // "messages", joined by " and "; "staged" for a device tensor.
  std::string transport() const;
  // How they reach this neighbor: one of these for CPU tensors; "staged", "staged, by rma" or "staged, by messages" for
  // device tensors.
  std::string transport_to(int neighbor) const;

  const at::Tensor& tensor() const {
    return tensor_;
  }
  // The default for operations.
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
  // The tensor that neighbors read and write: the window's tensor itself, or its copy on the host.
  const at::Tensor& host_tensor() const {
    return host_;
  }
  // Runs `change`, which changes the host tensor: neighbors get its state before or after the change.
  void publish(const std::function<void()>& change);
  // Returns whether the calling thread holds a mutex of the window.
  bool holds_mutex() const;
  std::string describe(const char* op) const;
  [[noreturn]] void fail(const char* op, const std::string& reason) const; // throws DistBackendError
  // Tells autograd about a change.
  static void count_change(const at::Tensor& tensor);

  // --- for the WindowService, which serves one source's operations one after the other ---
  size_t bytes() const {
    return values_.bytes;
  }
  bool is_neighbor(int rank) const; // other ranks may not request anything
  bool is_in(const c10::Storage& storage) const; // its tensor, or the copy on the host
  // Does kPut or kAccumulate of weight * data, and of p if given, in the slot of `source`, which had made `puts` puts
  // into its mailbox before.
  void apply(int source, WindowOp op, double weight, std::optional<double> p, uint64_t puts, const void* data, size_t bytes);
  // Does kWrite: writes into the tensor, from byte `offset` on.
  void receive(size_t offset, const void* data, size_t bytes);
  // Does kGet: copies the tensor.
  void read(void* out);
  // Called when the group is closed, or this rank has to leave it: new operations are refused with the reason.
  void on_group_closed(const std::string& reason);
  // Called with the engine's lock, on_gone() by any thread. mutex() returns the mutex of this rank and `source`; the
  // engine acts as its second side. on_gone(): `source` takes no further part.
  PairMutex& mutex(int source);
  void on_signal(int source);
  void on_gone(int source, const std::string& how);
  // Refuses new calls from then on. With or without the engine's lock.
  void close(const std::string& reason);

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

  // Throws ValueError unless this rank can create such a window.
  static void check_config(const WindowConfig& config);
  // prepare() does the steps that need no other rank, connect() the rest.
  static std::shared_ptr<Window> prepare(WindowConfig config, const StagingFactory& make_staging);
  void connect(const std::vector<WindowDescription>& descriptions, const Gather& gather);

  // start() begins all operations on neighbors. It first copies the tensor to the host if necessary; launch() then
  // sends the data.
  WorkPtr start(WindowOp op, const at::Tensor& tensor, const Peers& peers, const Options& options, size_t offset = 0);
  std::shared_ptr<Call> begin(WindowOp op, const at::Tensor& tensor, Milliseconds timeout);
  void launch(
      const std::shared_ptr<Call>& call, const at::Tensor& data, const Peers& peers, const Options& options, double p, size_t offset);
  void dispatch(Neighbor& peer, Part part, bool skip_lost);
  // Multiplies the tensor and p by the self weight. `data` are the sent values in order, and `p` is the p that was sent.
  void keep(const Call& call, const at::Tensor& data, double p, const Options& options);
  bool take_signal(const Neighbor& source, Deadline deadline);
  [[noreturn]] void refused(const char* op, const std::exception& refusal) const;

  // The owner's operations on slots. `copy` writes the slot's new value, or returns false; then the slot stays
  // unchanged, and replace_slot() returns false too.
  bool replace_slot(const Neighbor& source, const std::function<bool(void* out)>& copy);
  at::Tensor combine(double self_weight, const Peers& neighbors, bool reset, bool clone, bool with_p, Deadline deadline);
  // Runs `change` while it holds the mutexes that keep neighbors from reading the tensor.
  void change_tensor(Deadline deadline, const std::function<void()>& change);

  std::unique_ptr<RankMutex> make_mutex(RankMutex::Other other) const;
  // Returns the functions by which a rank, as `side`, gets a mutex in memory that it has mapped.
  RankMutex::Other word_of(PairMutex& word, PairMutex::Side side, const Neighbor& other) const;
  // Takes a mutex that the neighbor may hold, or seizes it if the neighbor's process has ended; returns false at the
  // deadline.
  bool acquire(PairMutex& mutex, PairMutex::Side side, const Neighbor& neighbor, Deadline deadline) const;
  void lock(RankMutex& mutex, int owner, int other, Deadline deadline) const;

  // --- these throw ValueError ---
  Neighbor& neighbor(const char* op, const char* argument, int rank, bool in, bool out) const;
  void check_peers(const char* op, const char* argument, const Peers& peers, bool out) const;
  // Checks the tensor of put() and accumulate().
  void check_input(const char* op, const at::Tensor& tensor, double self_weight) const;
  // Checks that `tensor` fits from element `offset` on.
  void check_written(const char* op, const at::Tensor& tensor, int64_t offset) const;
  void check_self_weight(const char* op, double self_weight) const;
  void check_tensor_in_place(const char* op) const;
  bool is_tensor_in_place() const;

  // --- these throw DistBackendError ---
  void check_open(const char* op) const;
  void check_abandoned(const char* op) const;
  std::exception_ptr failure(const char* op, const std::string& reason) const;
  std::string why_gone(const Neighbor& neighbor) const;

  // Called around all accesses to a neighbor's memory, and around serving a neighbor in this rank's memory: after
  // free() has begun, this rank starts no operations, but serves the neighbors that have not called it yet. Throws if
  // the window is closed.
  enum class For { kThisRank, kNeighbor };
  void begin_call(const char* op, For whom);
  void end_call();
  void leave();
  // Releases the memory, now or once no neighbor uses it any more.
  void release_memory();

  const std::shared_ptr<Group> group_;
  const at::Tensor tensor_;
  const at::Tensor host_;
  const c10::Storage storage_; // of host_; unchanged even if the tensor gets other memory
  const std::string name_;
  const std::vector<int> in_neighbors_;
  const std::vector<int> out_neighbors_;
  const Milliseconds timeout_;
  // From the creation: the program may give the tensor other memory, or another dtype.
  const at::Device device_;
  const SlotValues values_;
  const std::string layout_;
  const void* const data_;
  std::unique_ptr<WindowStaging> staging_; // null if the tensor is on the CPU

  std::shared_ptr<WindowMemory> memory_;
  uint64_t number_ = 0;
  std::vector<std::unique_ptr<Neighbor>> neighbors_; // in- and out-neighbors, by rank

  std::mutex owner_; // held by the thread that acts as the owner of the slots and changes or reads the tensor
  std::mutex p_mutex_;
  double p_ = 1.0;

  mutable std::mutex state_;
  std::condition_variable idle_;
  size_t calls_ = 0; // in progress
  std::string closed_reason_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> abandoned_{false}; // closed without free(), which leaves by itself
  mutable std::mutex leaving_;
  std::atomic<bool> left_{false};
  bool registered_ = false;
};

class Window::Hold {
 public:
  Hold(std::shared_ptr<Window> window, std::vector<RankMutex*> mutexes, bool publish)
      : window_(std::move(window)), mutexes_(std::move(mutexes)), publish_(publish) {}
  ~Hold();
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  // Unlocks; a second call does nothing. Throws ValueError in another thread than the one that created it.
  void release();

 private:
  std::shared_ptr<Window> window_; // null once released
  const std::vector<RankMutex*> mutexes_;
  const bool publish_;
};

} // namespace fog
