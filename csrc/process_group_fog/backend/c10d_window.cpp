#include "backend/c10d_window.hpp"

#ifdef C10D_BACKEND_HAS_WINDOW

#include <c10/util/Exception.h>

namespace fog {
namespace {

template <typename C10dOptions>
fog::Window::Options options_for(const fog::Window& window, const C10dOptions& options, bool async_op) {
  fog::Window::Options ours;
  ours.timeout = options.timeout > kNoTimeout ? options.timeout : window.timeout(); // kUnsetTimeout is negative
  ours.waits = !async_op;
  return ours;
}

// Converts a rank of c10d, which has more bits than fog's.
int narrow(const char* op, int64_t rank) {
  const auto narrowed = static_cast<int>(rank);
  TORCH_CHECK_VALUE(narrowed == rank, op, ": rank: got rank ", rank, ", which no group has");
  return narrowed;
}

// The result of a call of c10d, which waits itself unless it is asynchronous.
c10::intrusive_ptr<c10d::Work> returned(c10::intrusive_ptr<c10d::Work> work, bool async_op) {
  if (!async_op) {
    work->wait();
  }
  return work;
}

} // namespace

fog::Window& C10dWindow::window(const char* op) const {
  TORCH_CHECK_VALUE(window_ != nullptr, op, ": this window has no tensor; tensor_register() gives it one");
  return *window_;
}

void C10dWindow::tensor_register(const at::Tensor& tensor, bool owning) {
  TORCH_CHECK_VALUE(window_ == nullptr, "tensor_register: this window has a tensor; tensor_deregister() comes first");
  window_ = create_(tensor);
}

void C10dWindow::tensor_deregister() {
  auto& registered = window("tensor_deregister");
  registered.free(registered.timeout());
  window_ = nullptr;
}

c10::intrusive_ptr<c10d::Work> C10dWindow::put(
    const at::Tensor& tensor, int64_t destination, int64_t offset, bool async_op, const c10d::PutOptions& options) {
  auto& target = window("put");
  return returned(target.write(tensor, narrow("put", destination), offset, options_for(target, options, async_op)), async_op);
}

at::Tensor C10dWindow::map_remote_tensor(int64_t rank) {
  auto& target = window("map_remote_tensor");
  if (rank == rank_) {
    return target.tensor();
  }
  auto mapped = target.map_remote(narrow("map_remote_tensor", rank));
  TORCH_CHECK_VALUE(mapped.defined(), "map_remote_tensor: rank: got rank ", rank, ", whose memory this process cannot map");
  return mapped;
}

c10::intrusive_ptr<c10d::Work> C10dWindow::signal(int64_t peer, bool async_op, const c10d::SignalOptions& options) {
  auto& target = window("signal");
  return returned(target.signal(narrow("signal", peer), options_for(target, options, async_op)), async_op);
}

c10::intrusive_ptr<c10d::Work> C10dWindow::wait_signal(int64_t peer, bool async_op, const c10d::WaitSignalOptions& options) {
  auto& target = window("wait_signal");
  return returned(target.wait_signal(narrow("wait_signal", peer), options_for(target, options, async_op)), async_op);
}

c10d::WindowAttr C10dWindow::get_attr(int64_t peer) {
  auto& target = window("get_attr");
  const bool here = peer == rank_ || target.map_remote(narrow("get_attr", peer)).defined();
  return {here ? c10d::WindowAccessType::UNIFIED : c10d::WindowAccessType::SEPARATE};
}

} // namespace fog

#endif
