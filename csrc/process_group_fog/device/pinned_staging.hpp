// Windows of device tensors: what they have on the host.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "device/pinned_memory.hpp"
#include "device/stream.hpp"
#include "windows/window.hpp"

namespace fog::device {

// Serves any device, between any hosts. Slots are in host memory, and beside them is a copy of the tensor, from which neighbors get: the
// published copy. Both are the Window's; this copies between them and the device.
//
// - put and accumulate copy the tensor to the host on a stream of the window's own, behind what the current stream has to do;
//   a thread waits for the copy and starts the operation from there. So the host goes on at once, and the copy overlaps with
//   the program's own work and with what earlier operations still send. Operations start in the order of the calls.
// - get needs nothing of any device: it takes the published copy of the neighbor.
// - update waits until the current stream has done what it has, combines on the host, with the same bits as for a CPU tensor, and
//   leaves the result to the current stream to copy.
//
// The tensor is published when the window is made, by each update, by a put or an accumulate of the tensor itself with a self_weight,
// and when this rank gives back mutexes of its own. What else changes it is seen from the next of these on, and never half done.
//
// A thread that holds one of the window's mutexes runs its operations itself, and waits for their copies: the mutexes
// belong to the thread. A Work is complete once the device is done as well. Windows whose neighbors reach each other's device memory would
// be another way to stage; torch's symmetric memory is the way to them.
class PinnedStaging final : public WindowStaging {
 public:
  explicit PinnedStaging(Window& window);
  ~PinnedStaging() override;

  void check(const char* op) const override;
  void submit(const char* op, const at::Tensor& tensor, Deadline deadline, Go go, Fail fail) override;
  void finish(const char* op, const at::Tensor& tensor, const at::Tensor& staged, bool changed, Deadline deadline) override;
  at::Tensor update(const char* op, bool reads, bool clone, const std::function<at::Tensor()>& combine, Deadline deadline) override;
  void publish(const char* op, Deadline deadline) override;
  void receive(size_t offset, const void* data, size_t bytes) override;
  void drain(const char* op, Deadline deadline) override;

 private:
  // Its values are on their way to the host.
  struct Operation {
    const char* name;
    Deadline deadline;
    at::Tensor tensor; // the caller's; undefined if it sends nothing
    at::Tensor staged; // its values
    Event copied; // they are there
    Go go;
    Fail fail;
  };

  void run_queue();
  void run(Operation operation);
  // It copies the tensor, as it will be after what the current stream has, to where neighbors get it. The caller has `owner_`.
  void copy_to_published(const char* op, Deadline deadline);
  // It throws at the deadline. Whatever the device still has to do uses no memory that is given away.
  void await(const char* op, const Event& event, Deadline deadline) const;
  at::Tensor take_buffer(at::IntArrayRef sizes);
  void give_buffer(at::Tensor buffer);

  Window& window_;
  const at::Device device_;
  const at::Tensor published_; // the copy
  const at::Tensor flat_; // the tensor's values in order, where they were when the window was made
  const Stream stream_;
  const Stream received_; // of what neighbors write, which waits for nothing that the program has given the device
  PinnedMemory pinned_; // the published copy's

  std::mutex owner_; // held by the thread that reads or changes the published copy
  Event read_; // of the published copy by the device: it must not change before

  std::mutex mutex_;
  std::condition_variable idle_;
  std::deque<Operation> queue_; // not started yet
  bool running_ = false; // a thread is at the queue
  std::vector<at::Tensor> buffers_; // unused
};

} // namespace fog::device
