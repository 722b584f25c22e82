// torch's own interface of one-sided windows, from torch 2.14 on.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#ifdef C10D_BACKEND_HAS_WINDOW

#include <functional>
#include <memory>

#include "windows/window.hpp"

namespace fog {

// A Window with all ranks as neighbors, for its raw operations: put() writes into the other rank's tensor itself, and
// signals tell when the data is there. Tensors have the same shape and dtype on all ranks. Failures raise as in Window.
class C10dWindow final : public c10d::Window {
 public:
  // Creates fog's window of a tensor; collective.
  using Create = std::function<std::shared_ptr<fog::Window>(const at::Tensor& tensor)>;

  C10dWindow(Create create, int rank) : create_(std::move(create)), rank_(rank) {}

  // Moves the tensor's storage to memory that the other ranks can reach. The window keeps the storage even if `owning`
  // is false, because other ranks may write to it.
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
  // UNIFIED for memory that this process has mapped. Otherwise SEPARATE: the data of a put is in the other rank's
  // memory once its Work is complete.
  c10d::WindowAttr get_attr(int64_t peer) override;

 private:
  fog::Window& window(const char* op) const;

  const Create create_;
  const int rank_;
  std::shared_ptr<fog::Window> window_;
};

} // namespace fog

#endif
