// Windows of device tensors whose ranks map each other's device memory.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "windows/host_window.hpp"
#include "windows/window.hpp"
#include "windows/window_descriptions.hpp"
#include "cuda/kernel_types.hpp"
#include "cuda/operation_work.hpp"
#include "cuda/peer_memory.hpp"
#include "cuda/pinned_memory.hpp"
#include "cuda/stream.hpp"

namespace fog::cuda {

// For ranks of one host whose devices reach each other. The tensor, a slot for each in-neighbor, versions, p and locks are in device
// memory that the neighbors have mapped (PeerMemory). Every operation is a few kernels of the origin's device, on a stream of
// the window's own behind what the current stream has; the target takes no part, nor do its streams, and the host only starts the
// kernels. Work.wait() orders the current stream after them; so does update().
//
// - A slot has two buffers. put, accumulate and get write the one that is not the latest and then say so in one word, so that a
//   rank that dies meanwhile leaves the value that was there.
// - Meanwhile they hold the slot's lock, or the lock of the tensor that they read: PairLock, between the owner's window stream and
//   the neighbor's. A kernel that waits for a lock ends at the operation's time-out; then the rest of that part does nothing.
// - Kernels that wait for a neighbor look at a word in the host's memory, which says when that one's process has ended: what it held is
//   free then, and its signals do not come any more. No stream is needed for that, which might be behind the one that waits.
// - Nothing deadlocks: a stream does what it holds a lock for before what comes next in it, writers hold one lock at a time, and who
//   holds several takes his slots first, then tensors.
//
// The host learns of a failure when the device has come to it: the Work raises it then, or else the next call.
//
// Mutexes of users, the agreement on names, lost ranks and the end of the window are those of a HostWindow of one element. What needs a
// mutex is done before the call returns.
class PeerWindow final : public Window {
 public:
  // How many in-neighbors a rank may have.
  static constexpr size_t kMostSlots = kMostRows - 1;

  // Collective; the ranks are known to agree, and all have opened the memory of their neighbors: `views`, by all_neighbors(). The
  // tensor's storage moves into `memory`.
  static std::shared_ptr<PeerWindow> create(
      Recipe recipe,
      const std::vector<WindowDescription>& descriptions,
      std::shared_ptr<PeerMemory> memory,
      std::vector<std::unique_ptr<ForeignPeerMemory>> views,
      const Gather& gather);
  ~PeerWindow() override;

  WorkPtr put(const at::Tensor& tensor, const Peers& destinations, const Options& options) override;
  WorkPtr accumulate(const at::Tensor& tensor, const Peers& destinations, const Options& options) override;
  WorkPtr get(const Peers& sources, const Options& options) override;
  at::Tensor update(double self_weight, const Peers& neighbors, bool reset, bool clone, const Options& options) override;
  WorkPtr write(const at::Tensor& tensor, int destination, int64_t offset, const Options& options) override;
  WorkPtr signal(int destination, const Options& options) override;
  WorkPtr wait_signal(int source, const Options& options) override;
  at::Tensor map_remote(int neighbor) override;
  int64_t version(int neighbor) override;
  double p() override;
  void set_p(double p) override;
  void lock(const std::vector<int>& ranks, bool own, Milliseconds timeout) override;
  void unlock(const std::vector<int>& ranks, bool own) override;
  void free(Milliseconds timeout) override;
  const char* transport() const override {
    return "peer memory";
  }
  const char* transport_to(int neighbor) const override {
    check_neighbor("transport_to", "rank", neighbor, true, true);
    return transport();
  }

 private:
  struct Neighbor {
    int rank;
    size_t slot; // if it is an in-neighbor
    size_t door;
    std::unique_ptr<ForeignPeerMemory> view;
    size_t slot_there; // if it is an out-neighbor
    size_t door_there;
  };
  // A slot in mapped memory, by its number among its owner's.
  struct SlotPlace {
    WindowSlot* first;
    size_t number;
    char* buffers;
    size_t stride;
  };
  using Clock = std::chrono::steady_clock;

  PeerWindow(Recipe recipe, std::shared_ptr<HostWindow> host, std::shared_ptr<PeerMemory> memory);

  std::shared_ptr<PeerWindow> self() {
    return std::static_pointer_cast<PeerWindow>(shared_from_this());
  }
  WorkPtr write_slots(const char* op, bool adds, const at::Tensor& tensor, const Peers& destinations, const Options& options);
  // Takes `enqueue_`; throws if the window is closed.
  std::unique_lock<std::mutex> begin_call(const char* op);
  // Runs every kernel once, without effect: CUDA loads one when it is first started, and may wait for all that runs, a kernel that
  // waits for another rank for example.
  void load_kernels();
  // Throws what an earlier operation has failed with, if nobody has heard of it.
  void check(const char* op);
  // Those of `peers` to whom something may be started; what to fail with if one has gone who must not be left out.
  Peers present(const char* op, const Peers& peers, const Options& options, std::exception_ptr& error) const;
  std::unique_ptr<Hold> hold_mutexes(const Peers& peers, bool own, const Options& options);
  const Neighbor& neighbor(int rank) const;

  // --- with `enqueue_`, the window's stream being the current one ---
  void start(const char* kernel, std::initializer_list<const void*> arguments) const;
  void begin() const;
  void lock_on_device(const Locks& one, const Locks& two, int part, Milliseconds timeout) const;
  void unlock_on_device(const Locks& one, const Locks& two) const;
  // One part: with these locks, a slot becomes weight * source, or grows by that; its p by that of `p`, unless that is null.
  void write_slot(
      const SlotPlace& place,
      const Locks& one,
      const Locks& two,
      bool adds,
      const void* source,
      double weight,
      const double* p,
      int part,
      Milliseconds timeout) const;
  void keep(const at::Tensor& tensor, const at::Tensor& data, int part, const Options& options) const;
  // Ends an operation whose parts are of these ranks.
  std::shared_ptr<Outcome> finish(const char* op, std::vector<int> ranks, const Stream& stream, const int* any);

  WorkPtr work_of(std::shared_ptr<Outcome> outcome, std::vector<at::Tensor> tensors);
  WorkPtr failed_work(std::exception_ptr error) const;
  Locks own_slots() const;
  Locks own_tensor() const;
  // One, of this neighbor's and this rank's.
  Locks lock_of(const Neighbor& neighbor, PairLock* lock, size_t stride, int side) const;
  Handle handle(const Stream& stream) const;
  template <typename T>
  T* own(size_t offset) const {
    return reinterpret_cast<T*>(memory_->at(offset));
  }
  // Eight bytes of the device.
  uint64_t read(const char* op, size_t offset);
  void await(const char* op, const Event& event, Deadline deadline) const;
  // Until all operations have been done; false at the window's time-out.
  bool wait_for_streams() const noexcept;
  // The process of a neighbor has ended.
  void on_ended(int rank);

  const std::shared_ptr<HostWindow> host_;
  const at::Device device_;
  const std::shared_ptr<PeerMemory> memory_;
  std::vector<Neighbor> neighbors_; // by rank
  const Stream stream_;
  const Stream signals_; // on which waits for signals are: what they wait for may come after what is on any other
  // Words that are not 0 once the process of a neighbor has ended: by door, then by slot.
  const std::shared_ptr<MappedMemory> gone_;

  std::mutex enqueue_; // held by the thread that starts an operation
  std::shared_ptr<HostCells> cells_;
  std::deque<std::shared_ptr<Outcome>> outcomes_; // that nobody has looked at
  bool closed_ = false;
  bool freed_ = false; // and nobody uses this rank's memory any more
};

} // namespace fog::cuda
