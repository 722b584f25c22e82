// One-sided windows: ranks write into memory of their neighbors, and read it, while these do something else.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "engine/group.hpp"

namespace fog {

// A tensor of each rank of a group, and beside it a slot for each in-neighbor, into which that one puts or accumulates and
// into which this rank gets the neighbor's tensor. This is what every window does; where its memory lies, and who moves the
// data, is for those that derive from it:
//
// - HostWindow: tensors of the CPU, in shared memory on one host and by messages between hosts;
// - device::StagedWindow: tensors of any device, over a HostWindow.
//
// A slot is never seen half written, and a tensor never half updated by update(). Operations of one rank on one neighbor are done in
// the order of their calls. What fails because of one peer fails alone: the group goes on. Any thread may call; the GIL is not needed.
class Window : public std::enable_shared_from_this<Window> {
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
    std::optional<double> p = std::nullopt; // instead of p() of now
  };
  // Gathers all ranks' bytes, one after the other.
  using Gather = std::function<std::string(const std::string& mine)>;
  // What a window is made of.
  struct Recipe {
    std::shared_ptr<Group> group;
    at::Tensor tensor;
    std::string name;
    std::vector<int> in_neighbors;
    std::vector<int> out_neighbors;
    bool zero_init = false;
    Milliseconds timeout{0};
  };

  // Throws ValueError unless this rank can make a window of that.
  static void check_recipe(const Recipe& recipe);
  virtual ~Window() = default;
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // Slot [destination][this rank] becomes weight * tensor, or grows by that; p as well, by weight * p() of now. Until the Work is
  // complete the tensor must not change. Before it is, and only if nothing has failed, the tensor and p() are multiplied by
  // `self_weight`: the tensor itself, which need not be contiguous.
  virtual WorkPtr put(const at::Tensor& tensor, const Peers& destinations, const Options& options) = 0;
  virtual WorkPtr accumulate(const at::Tensor& tensor, const Peers& destinations, const Options& options) = 0;
  // Slot [this rank][source] becomes weight * the source's tensor.
  virtual WorkPtr get(const Peers& sources, const Options& options) = 0;
  // self_weight * tensor + the weighted sum of the neighbors' slots, in the window's tensor or, with `clone`, in a new one.
  // With `reset` these slots are zeros from then on; what is taken is what is in the sum, whatever comes meanwhile. All versions
  // count from 0 again.
  virtual at::Tensor update(double self_weight, const Peers& neighbors, bool reset, bool clone, const Options& options) = 0;

  // --- what c10d::Window has besides ---
  // Into the destination's tensor itself, from element `offset` on: no slot, nothing is kept from being torn. signal() says
  // when it is there: of one rank to another, signals come after what was written before.
  virtual WorkPtr write(const at::Tensor& tensor, int destination, int64_t offset, const Options& options) = 0;
  virtual WorkPtr signal(int destination, const Options& options) = 0;
  // Takes one signal of this source, or waits for it.
  virtual WorkPtr wait_signal(int source, const Options& options) = 0;
  // A neighbor's tensor where it is; undefined if this process has not mapped it. The window lives as long.
  virtual at::Tensor map_remote(int neighbor) = 0;

  // Puts and gets into slot [this rank][neighbor] since the last update.
  virtual int64_t version(int neighbor) = 0;
  virtual double p() = 0;
  virtual void set_p(double p) = 0;

  // The mutexes [rank][this rank] of these ranks, or [this rank][rank] if `own`; of all that there are, in one order, so that no two
  // calls block each other. A thread that has one may take it again. DistBackendError at the time-out, with none taken.
  virtual void lock(const std::vector<int>& ranks, bool own, Milliseconds timeout) = 0;
  virtual void unlock(const std::vector<int>& ranks, bool own) = 0;
  // The same until the end of what it returns.
  class Hold;
  std::unique_ptr<Hold> hold(std::vector<int> ranks, bool own, Milliseconds timeout);

  // Waits for what is in flight and for the neighbors to call it too; then nobody uses this rank's memory.
  virtual void free(Milliseconds timeout) = 0;

  // How this rank's operations reach its neighbors: "shared memory", "messages" or "shared memory and messages" of CPU tensors,
  // "staged" of devices'.
  virtual const char* transport() const = 0;
  // How they reach this one: a single word of these, or "staged, by messages".
  virtual const char* transport_to(int neighbor) const = 0;

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

 protected:
  explicit Window(Recipe recipe);

  // --- these throw ValueError ---
  void check_neighbor(const char* op, const char* argument, int rank, bool in, bool out) const;
  void check_peers(const char* op, const char* argument, const Peers& peers, bool out) const;
  // `tensor` is what put() and accumulate() take.
  void check_input(const char* op, const at::Tensor& tensor, double self_weight) const;
  // `tensor` fits from element `offset` on.
  void check_written(const char* op, const at::Tensor& tensor, int64_t offset) const;
  void check_self_weight(const char* op, double self_weight) const;
  void check_tensor_in_place(const char* op) const;
  bool is_tensor_in_place() const;

  std::string describe(const char* op) const;
  std::exception_ptr failure(const char* op, const std::string& reason) const; // DistBackendError
  [[noreturn]] void fail(const char* op, const std::string& reason) const;
  // For autograd.
  static void count_change(const at::Tensor& tensor);

  const std::shared_ptr<Group> group_;
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
  const void* const data_;
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
