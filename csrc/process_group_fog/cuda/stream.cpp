#include "stream.hpp"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace fog::cuda {
namespace {

using c10::impl::VirtualGuardImpl;

template <typename Guard>
auto ask_whether_capturing(const Guard& guard, const c10::Stream& stream, int) -> decltype(guard.isStreamCapturing(stream)) {
  return guard.isStreamCapturing(stream);
}

template <typename Guard>
bool ask_whether_capturing(const Guard&, const c10::Stream&, long) {
  return false;
}

} // namespace

std::optional<c10::Stream> current_stream(const at::Device& device) {
  return device.is_cpu() ? std::nullopt : std::make_optional(VirtualGuardImpl(device.type()).getStream(device));
}

bool is_capturing(const at::Device& device) {
  const auto stream = current_stream(device);
  return stream && ask_whether_capturing(VirtualGuardImpl(device.type()), *stream, 0);
}

void use_on(const c10::Stream& stream, const at::Tensor& tensor) {
  if (tensor.has_storage() && tensor.storage().nbytes() > 0) {
    VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
}

Stream::Stream(const at::Device& device) {
  if (!device.is_cpu()) {
    stream_ = VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  }
}

Stream::Guard::Guard(const Stream& stream) {
  if (const auto& own = stream.get()) {
    const auto device = own->device();
    c10::Event now(device.type());
    now.record(*current_stream(device));
    now.block(*own);
    guard_.reset_stream(*own);
  }
}

Event Stream::record() const {
  if (!stream_) {
    return nullptr;
  }
  auto event = std::make_shared<c10::Event>(stream_->device_type());
  event->record(*stream_);
  return event;
}

void order_after(const Event& event) {
  if (event) {
    event->block(*current_stream({event->device_type(), event->device_index()}));
  }
}

bool has_happened(const Event& event) {
  return !event || event->query();
}

bool is_known_to_have_happened(const Event& event) noexcept {
  try {
    return has_happened(event);
  } catch (const std::exception&) { // the device has failed, or captures
    return false;
  }
}

} // namespace fog::cuda
