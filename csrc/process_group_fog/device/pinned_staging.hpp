// The host side of windows of device tensors.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "device/stream.hpp"
#include "windows/window.hpp"

namespace fog::device {

// Page-locks existing memory of the host during its lifetime, so that a device can access it directly, by the CUDA runtime
// that torch has loaded. Does nothing without such a runtime or if it refuses.
class PinnedMemory {
 public:
  PinnedMemory(const at::Device& device, void* memory, size_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

 private:
  const at::Device device_;
  void* memory_ = nullptr; // null if it is not locked
};

// Serves any device, between any hosts. Slots are in host memory. Neighbors get the tensor from a copy in host memory,
// the published copy. Both belong to the Window; this class copies between them and the device.
//
// - put and accumulate copy the tensor to the host on a separate stream of the window, after the work on the current
//   stream. A thread waits for the copy and starts the operation from there. So the host continues at once, and the
//   copy overlaps with the program's own work and with the sends of earlier operations. Operations start in the order
//   of the calls.
// - get needs no device: it reads the neighbor's published copy.
// - update waits for the work on the current stream, combines on the host, with the same bits as for a CPU tensor, and
//   queues the copy of the result on the current stream.
//
// The tensor is published when the window is created, by each update, by a put or an accumulate of the tensor itself
// with a self_weight, and when this rank releases mutexes of its own. Other changes become visible at the next of these
// times, and never partially.
//
// A thread that holds one of the window's mutexes runs its operations itself and waits for their copies, because the
// mutexes belong to the thread. A Work is complete once the device is done as well. An alternative way of staging would
// be windows whose neighbors access each other's device memory, by torch's symmetric memory.
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
  // An operation whose tensor is being copied to the host.
  struct Operation {
    const char* name;
    Deadline deadline;
    at::Tensor tensor; // the caller's; undefined if nothing is sent
    at::Tensor staged; // its values on the host
    Event copied; // when they have been copied
    Go go;
    Fail fail;
  };

  void run_queue();
  void run(Operation operation);
  // Copies the tensor, as it will be after the current stream's work, to the published copy. Requires `owner_`.
  void copy_to_published(const char* op, Deadline deadline);
  // Throws at the deadline. The memory that the device may still use is not released.
  void await(const char* op, const Event& event, Deadline deadline) const;

  Window& window_;
  const at::Device device_;
  const at::Tensor published_; // the published copy
  const at::Tensor flat_; // the tensor's values in order, at their address at the window's creation
  const Stream stream_;
  // For data that neighbors write. The engine waits for it, so it must not wait for the program's work on the device.
  const Stream received_;
  PinnedMemory pinned_; // for the published copy

  std::mutex owner_; // held by the thread that reads or changes the published copy
  Event read_; // when the device has read the published copy, which must not change before

  std::mutex mutex_;
  std::condition_variable idle_;
  std::deque<Operation> queue_; // not started yet
  bool running_ = false; // a thread runs the queue
};

} // namespace fog::device
