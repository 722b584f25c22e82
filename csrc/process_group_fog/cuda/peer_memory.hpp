// The device memory of one rank's window, and how other processes reach it.
#pragma once

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

#include "cuda/driver.hpp"
#include "cuda/kernel_types.hpp"

namespace fog::cuda {

// Where things are in it; offsets in bytes. Ranks have the same but for the number of neighbors and for the tensor's storage.
struct PeerLayout {
  size_t slots = 0; // WindowSlot of each in-neighbor
  size_t doors = 0; // WindowDoor of each neighbor
  size_t p = 0; // double
  size_t began = 0; // for window_begin
  size_t any = 0;
  size_t failed = 0;
  size_t signal = 0; // outcome of a wait for a signal
  size_t practice = 0; // a WindowDoor of nobody's
  size_t sum = 0;
  size_t control = 0; // the end of all this, which starts as zeros
  size_t storage = 0; // what was the tensor's
  size_t tensor = 0; // in it
  size_t buffers = 0; // two of each slot
  size_t stride = 0; // from one to the next
  size_t bytes = 0;

  PeerLayout() = default;
  PeerLayout(const at::Tensor& tensor, size_t slots, size_t doors);
};

// This process's own. It is given back after the last reference: by then nobody may use it.
class PeerMemory {
 public:
  // RuntimeError if the device has no driver, no memory or none to share.
  PeerMemory(const at::Device& device, const PeerLayout& layout);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // What opens it in other processes: bytes, not text.
  std::string address() const;
  Address at(size_t offset) const {
    return base_ + offset;
  }
  const PeerLayout layout;

 private:
  const at::Device device_;
  Address base_ = 0;
};

// A neighbor's.
class ForeignPeerMemory {
 public:
  // RuntimeError if the device cannot map it.
  ForeignPeerMemory(const at::Device& device, const std::string& address);
  ~ForeignPeerMemory();
  ForeignPeerMemory(const ForeignPeerMemory&) = delete;
  ForeignPeerMemory& operator=(const ForeignPeerMemory&) = delete;

  // Not mapped any more, when this returns; it may wait for all that the device has been given. The end of the object does not wait.
  void close();

  Address at(size_t offset) const {
    return base_ + offset;
  }
  const PeerLayout& layout() const {
    return layout_;
  }

 private:
  const at::Device device_;
  PeerLayout layout_;
  Address base_ = 0;
};

} // namespace fog::cuda
