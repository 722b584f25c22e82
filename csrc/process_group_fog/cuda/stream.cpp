#include "stream.hpp"

#include <map>
#include <mutex>

#include <ATen/ops/empty.h>
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

// What frees memory that torch allocates on a type of device. By an example: c10::GetAllocator() does not know of one that the program
// has put in the place of torch's own.
c10::DeleterFnPtr allocator_deleter(const at::Device& device) {
  static std::mutex mutex;
  static auto* known = new std::map<at::DeviceType, c10::DeleterFnPtr>;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = known->find(device.type()); found != known->end()) {
      return found->second;
    }
  }
  const auto example = at::empty({1}, at::TensorOptions(device).dtype(at::kByte));
  const std::lock_guard<std::mutex> lock(mutex);
  return known->emplace(device.type(), example.storage().data_ptr().get_deleter()).first->second;
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
  if (!tensor.has_storage() || tensor.storage().nbytes() == 0) {
    return;
  }
  const auto& data = tensor.storage().data_ptr();
  if (data.get_deleter() == allocator_deleter(stream.device())) {
    VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(data, stream);
  }
}

Stream::Stream(const at::Device& device) {
  if (!device.is_cpu()) {
    stream_ = VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
    allocator_deleter(device); // here, where it may allocate: use_on() is called in destructors too
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
