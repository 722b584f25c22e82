// torch's own interface of one-sided windows, from torch 2.14 on.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#ifdef C10D_BACKEND_HAS_WINDOW

#include <functional>
#include <memory>

#include "windows/window.hpp"

namespace fog {

// A Window in which all ranks are neighbors, for its raw part: put() writes into the other rank's tensor itself, and signals say
// when that has come. Tensors are of one shape and dtype on all ranks. What fails raises as it does in Window.
class C10dWindow final : public c10d::Window {
 public:
  // Makes fog's window of a tensor; collective.
  using Create = std::function<std::shared_ptr<fog::Window>(const at::Tensor& tensor)>;

  C10dWindow(Create create, int rank) : create_(std::move(create)), rank_(rank) {}

  // The tensor's storage moves to where the others reach it. With `owning` false the window keeps the storage all the same: others may
  // write to it.
  void tensor_register(const at::Tensor& tensor, bool owning = true) override;
  void tensor_deregister() override;
  c10::intrusive_ptr<c10d::Work> put(
      const at::Tensor& tensor,
      int64_t destination,
      int64_t offset,
      bool async_op,
      const c10d::PutOptions& options = c10d::PutOptions()) override;
  at::Tensor map_remote_tensor(int64_t rank) override;
  c10::intrusive_ptr<c10d::Work> signal(
      int64_t peer, bool async_op, const c10d::SignalOptions& options = c10d::SignalOptions()) override;
  c10::intrusive_ptr<c10d::Work> wait_signal(
      int64_t peer, bool async_op, const c10d::WaitSignalOptions& options = c10d::WaitSignalOptions()) override;
  // Memory that this process has mapped is one; between hosts a put is in the other rank's once its Work is complete.
  c10d::WindowAttr get_attr(int64_t peer) override;

 private:
  fog::Window& window(const char* op) const;

  const Create create_;
  const int rank_;
  std::shared_ptr<fog::Window> window_;
};

} // namespace fog

#endif
