// Windows of device tensors that reach their neighbors through the host.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "windows/host_window.hpp"
#include "windows/window.hpp"
#include "engine/work.hpp"
#include "device/pinned_memory.hpp"
#include "device/stream.hpp"

namespace fog::device {

// Serves any device, between any hosts. It has a HostWindow inside, with slots in host memory, and beside them a copy of the
// tensor, from which neighbors get: the published copy.
//
// - put and accumulate copy the tensor to the host on a stream of the window's own, behind what the current stream has to do;
//   a thread waits for the copy and starts the operation of the HostWindow. So the host goes on at once, and the copy overlaps with
//   the program's own work and with what earlier operations still send. Operations start in the order of the calls.
// - get needs nothing of any device: it takes the published copy of the neighbor.
// - update waits until the current stream has done what it has, combines on the host, with the same bits as for a CPU tensor, and
//   leaves the result to the current stream to copy.
//
// The tensor is published when the window is made, by each update, by a put or an accumulate of the tensor itself with a self_weight,
// and when this rank gives back mutexes of its own. What else changes it is seen from the next of these on, and never half done.
//
// A thread that holds one of the window's mutexes runs its operations itself, and waits for their copies: the mutexes
// belong to the thread. A Work is complete once the device is done as well.
class StagedWindow final : public Window {
 public:
  // Collective; the ranks are known to agree.
  static std::shared_ptr<StagedWindow> create(Recipe recipe, const Gather& gather);
  ~StagedWindow() override;

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
    return "staged";
  }
  const char* transport_to(int neighbor) const override;

 private:
  using Clock = std::chrono::steady_clock;
  // An operation that has been called, until it is complete.
  struct Operation {
    const char* name;
    Deadline deadline;
    at::Tensor tensor; // the caller's; undefined if it sends nothing
    at::Tensor staged; // its values, on the host
    Event copied; // they are there
    // What the HostWindow does with them.
    std::function<WorkPtr(HostWindow& host, const at::Tensor& staged)> start;
    bool keeps_share = false; // the host has multiplied `staged` by a self_weight, which the tensor is to have
    c10::intrusive_ptr<WorkFog> work;
  };

  StagedWindow(Recipe recipe, std::shared_ptr<HostWindow> host);

  std::shared_ptr<StagedWindow> self() {
    return std::static_pointer_cast<StagedWindow>(shared_from_this());
  }
  // Throws unless operations may be called.
  void check(const char* op) const;
  // `title` is for profilers. The tensor's copy is begun.
  WorkPtr submit(Operation operation, const char* title);
  void run_queue();
  void start(Operation operation);
  void end(const Operation& operation, std::exception_ptr error);
  // Copies the tensor, as it will be after what the current stream has, to where neighbors get it.
  void publish(const char* op, Deadline deadline);
  // Throws at the deadline. Whatever the device still has to do uses no memory that is given away.
  void await(const char* op, const Event& event, Deadline deadline) const;
  // On the stream, and waits for it.
  void copy_to_device(const char* op, const at::Tensor& to, const at::Tensor& from, Deadline deadline);
  at::Tensor take_buffer();
  void give_buffer(at::Tensor buffer);

  const std::shared_ptr<HostWindow> host_;
  const Stream stream_;
  PinnedMemory pinned_; // the published copy

  std::mutex owner_; // held by the thread that reads or changes the published copy
  Event read_; // of the published copy by the device: it must not change before

  std::mutex mutex_;
  std::condition_variable idle_;
  std::deque<Operation> queue_; // not started yet
  bool running_ = false; // a thread is at the queue
  size_t calls_ = 0; // not complete
  bool closed_ = false;
  std::vector<at::Tensor> buffers_; // unused
};

} // namespace fog::device
