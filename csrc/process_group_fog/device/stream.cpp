#include "device/stream.hpp"

#include <map>
#include <mutex>

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "device/runtime.hpp"

namespace fog::device {
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

// The function that frees torch's memory on a type of device. It is taken from an example tensor, because
// c10::GetAllocator() does not know about an allocator that the program has installed instead of torch's own.
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

bool is_allocated_by_torch(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().nbytes() > 0 &&
      tensor.storage().data_ptr().get_deleter() == allocator_deleter(tensor.device());
}

c10::Stream stream_of_pool(const at::Device& device) {
  return VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

// For torch, the number of a stream that it has not made is the runtime's pointer.
c10::Stream stream_beside_pool(const at::Device& device) {
  constexpr unsigned kNonBlocking = 1; // cudaStreamNonBlocking: does not wait for the default stream
  static std::mutex mutex;
  static auto* known = new std::map<c10::DeviceIndex, c10::Stream>;
  auto* create = device.is_cuda() ? of_runtime<int(void**, unsigned)>("cudaStreamCreateWithFlags") : nullptr;
  if (create == nullptr) {
    return stream_of_pool(device);
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known->find(device.index()); found != known->end()) {
    return found->second;
  }
  const c10::DeviceGuard guard(device);
  void* made = nullptr;
  if (create(&made, kNonBlocking) == 0) {
    return known->emplace(device.index(), c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(made)))
        .first->second;
  }
  forget_error();
  return stream_of_pool(device);
}

} // namespace

c10::Stream current_stream(const at::Device& device) {
  return VirtualGuardImpl(device.type()).getStream(device);
}

bool is_capturing(const at::Device& device) {
  return ask_whether_capturing(VirtualGuardImpl(device.type()), current_stream(device), 0);
}

void use_on(const c10::Stream& stream, const at::Tensor& tensor) {
  if (tensor.device().type() == stream.device_type() && is_allocated_by_torch(tensor)) {
    VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
}

Event record_on(const c10::Stream& stream) {
  const auto device = stream.device();
  const c10::DeviceGuard guard(device);
  auto event = Event(new c10::Event(device.type()), [device](c10::Event* dropped) {
    c10::OptionalDeviceGuard there;
    try {
      there.reset_device(device);
    } catch (const std::exception&) { // the device has failed, or ended with the process
    }
    delete dropped;
  });
  event->record(stream);
  return event;
}

Stream::Stream(const at::Device& device, From from)
    : stream_(from == From::kPool ? stream_of_pool(device) : stream_beside_pool(device)) {
  allocator_deleter(device); // call it here, because it may allocate, and use_on() is also called in destructors
}

Stream::Guard::Guard(const Stream& stream) {
  record_on(current_stream(stream.get().device()))->block(stream.get());
  guard_.reset_stream(stream.get());
}

Event Stream::record() const {
  return record_on(stream_);
}

void order_after(const Event& event) {
  if (event) {
    event->block(current_stream({event->device_type(), event->device_index()}));
  }
}

bool has_happened(const Event& event) {
  return !event || event->query();
}

bool is_known_to_have_happened(const Event& event) noexcept {
  try {
    return has_happened(event);
  } catch (const std::exception&) { // the device has failed, or is capturing
    return false;
  }
}

} // namespace fog::device
