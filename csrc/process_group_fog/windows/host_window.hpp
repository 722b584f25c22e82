// Windows of CPU tensors: in shared memory on one host, by messages between hosts.
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

#include "core/deadline.hpp"
#include "engine/group.hpp"
#include "windows/window_endpoint.hpp"
#include "windows/window_service.hpp"
#include "windows/rank_mutex.hpp"
#include "windows/window_memory.hpp"
#include "windows/window.hpp"
#include "windows/window_descriptions.hpp"
#include "engine/work.hpp"

namespace fog {

// A window of CPU tensors.
//
// On one host the origin copies, or adds, straight into the slot: the target takes no part, and no message is sent. Between
// hosts the target's engine does it (WindowService). What waits for nothing is complete on return. A tensor is never seen half
// updated by update(), but the owner's own arithmetic on it is seen as it goes on, unless both sides use the mutex.
class HostWindow final : public Window, public WindowEndpoint {
 public:
  // Takes what write() sends, in a thread of the engine.
  using Receiver = std::function<void(size_t offset, const void* data, size_t bytes)>;

  // Collective. Throws ValueError on every rank if they disagree. With a `receiver`, which all ranks give or none, what write() sends
  // goes to it instead of the tensor, by messages also on one host.
  static std::shared_ptr<HostWindow> create(Recipe recipe, const Gather& gather, Receiver receiver = nullptr);
  ~HostWindow() override;
  // Windows that were dropped and whose memory neighbors may still use.
  static size_t buried();

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
  const char* transport() const override;
  const char* transport_to(int neighbor) const override;

  // --- for a window of a device's tensors that has one of these inside ---
  // Runs `change`, which changes the tensor: whoever gets it sees it as it was before or as it is afterwards.
  void publish(Milliseconds timeout, const std::function<void()>& change);
  // Whether this thread holds a mutex of the window.
  bool holds_mutex() const;
  bool is_open() const {
    return !closed_;
  }
  // Throws DistBackendError if it is not.
  void check_open(const char* op) const;

  // --- WindowEndpoint ---
  size_t bytes() const override {
    return bytes_;
  }
  bool is_neighbor(int rank) const override;
  void apply(int source, WindowOp op, double weight, std::optional<double> p, const void* data, size_t bytes) override;
  void read(void* out) override;
  void write(int source, size_t offset, const void* data, size_t bytes) override;
  void on_group_closed() override;
  PairMutex& mutex(int source) override;
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

  std::shared_ptr<HostWindow> self() {
    return std::static_pointer_cast<HostWindow>(shared_from_this());
  }

  explicit HostWindow(Recipe recipe);

  // What needs no other rank.
  static std::shared_ptr<HostWindow> prepare(Recipe recipe);
  void connect(const std::vector<WindowDescription>& descriptions, const Gather& gather);
  c10::intrusive_ptr<c10d::Work> start(WindowOp op, const at::Tensor& tensor, const Peers& peers, const Options& options);
  std::shared_ptr<Call> begin(WindowOp op, const std::vector<at::Tensor>& inputs);
  void dispatch(Part part, bool skip_lost);
  void send(Part part);
  [[noreturn]] void refused(const char* op, const std::exception& refusal) const;
  void run_queue(Neighbor& neighbor);
  // Runs the first of the queue, or ends it with `error` if it is one of the call that `failed`; `locked`: this thread has the
  // mutex. False if there is nothing (else) to run.
  bool run_first(Neighbor& neighbor, bool locked, const Call* failed, std::exception_ptr error);
  void execute(const Part& part);
  // In the slot of `view`, as its writer.
  void write_slot(const WindowView& view, size_t slot, WindowOp op, double weight, std::optional<double> p, const void* data);
  // The neighbor's tensor, in this rank's slot for it.
  void fetch(Neighbor& neighbor, double weight, Deadline deadline);
  // Takes a mutex that the neighbor holds, or seizes it if its process has ended; false at the deadline.
  bool acquire(PairMutex& mutex, PairMutex::Side side, const Neighbor& neighbor, Deadline deadline) const;
  // weight * data; zeros if the weight is 0, whatever the data. `others_read`: see linear_combination().
  void scale(void* out, const void* data, double weight, bool others_read = false) const;
  bool take_signal(const Neighbor& source, Deadline deadline);
  // Multiplies what was sent, whose values in order are `data`, and p, which was `p` then, by what this rank keeps.
  void keep(const char* op, const at::Tensor& tensor, const at::Tensor& data, double p, const Options& options, Deadline deadline);
  // With the mutexes that keep neighbors from reading the tensor while `change` changes it.
  void change_tensor(Deadline deadline, const std::function<void()>& change);

  Neighbor& neighbor(const char* op, const char* argument, int rank, bool in, bool out) const;
  std::vector<RankMutex*> mutexes(const char* op, std::vector<int> ranks, bool own) const;
  void check_abandoned(const char* op) const;
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

  Receiver receiver_;
  std::unique_ptr<WindowMemory> memory_;
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

} // namespace fog
