// The parts of a window in this process's pool, where neighbors reach them one-sidedly.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "engine/group.hpp"
#include "transport/mpi/remote_memory.hpp"
#include "windows/mailbox.hpp"
#include "windows/window_descriptions.hpp"
#include "windows/window_memory.hpp"

namespace fog {

struct WindowConfig;

// The one-sided access to that rank's memory; null if there is none, or if this process has mapped the memory.
mpi::RemoteMemory* one_sided(const Group& group, int rank);

// Frees its memory on destruction, except the tensor's memory, which belongs to the tensor's storage.
class WindowPool {
 public:
  // Allocates the window's label and a mailbox for each in-neighbor that reaches this process one-sidedly. If
  // out-neighbors do, moves the memory of `tensor` here, unless another window has already told neighbors its address.
  // Returns null if no neighbor does, or if too little memory is left: then all of them use messages, and the log has a
  // warning.
  static std::unique_ptr<WindowPool> create(const WindowConfig& config, const at::Tensor& tensor);
  ~WindowPool();
  WindowPool(const WindowPool&) = delete;
  WindowPool& operator=(const WindowPool&) = delete;

  void* label() const {
    return label_;
  }
  // Null if that in-neighbor has no mailbox.
  Mailbox* mailbox(size_t slot) const {
    return mailboxes_[slot];
  }
  // The addresses in this pool, once the window has its label.
  PoolAddresses addresses(const WindowLabel& label) const;

 private:
  explicit WindowPool(mpi::RemoteMemory& pool) : pool_(pool) {}
  // Null if too little memory is left; then later calls return null too.
  void* take(size_t bytes);

  mpi::RemoteMemory& pool_;
  std::vector<void*> blocks_;
  bool full_ = false;
  void* label_ = nullptr;
  std::vector<Mailbox*> mailboxes_; // by in-neighbor
};

} // namespace fog
