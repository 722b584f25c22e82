// What of a window lies in this process's pool, where neighbors reach it one-sidedly.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "engine/group.hpp"
#include "transport/one_sided.hpp"
#include "windows/mailbox.hpp"
#include "windows/window_descriptions.hpp"
#include "windows/window_memory.hpp"

namespace fog {

struct WindowConfig;

// How this process reaches that rank's memory while it takes no part; null where it cannot, or has it mapped.
OneSided* one_sided(const Group& group, int rank);

// All of it is given back when this is destroyed, but for the tensor's memory, which goes with the tensor's storage.
class WindowPool {
 public:
  // For the in-neighbors that reach this process so it has a mailbox each; for the out-neighbors that do the memory of `tensor`, which moves
  // here unless another window has given its place to neighbors already; for both the window's label. Null if there are none, or if too
  // little is left: then all of them use messages, and a line in the log says so.
  static std::unique_ptr<WindowPool> create(const WindowConfig& config, const at::Tensor& tensor);
  ~WindowPool();
  WindowPool(const WindowPool&) = delete;
  WindowPool& operator=(const WindowPool&) = delete;

  void* label() const {
    return label_;
  }
  // Null if that in-neighbor has none.
  Mailbox* mailbox(size_t slot) const {
    return mailboxes_[slot];
  }
  // Of what lies here, once the window has its label.
  PoolAddresses addresses(const WindowLabel& label) const;

 private:
  explicit WindowPool(OneSided& pool) : pool_(pool) {}
  // Null if there is too little; then nothing more is asked for.
  void* take(size_t bytes);

  OneSided& pool_;
  std::vector<void*> blocks_;
  bool full_ = false;
  void* label_ = nullptr;
  std::vector<Mailbox*> mailboxes_; // by in-neighbor
};

} // namespace fog
