#include "device.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>
#include <torch/library.h>

namespace py = pybind11;

namespace device_double {
namespace {

// --- the host's calls for streams, in order ---

struct Entry {
  std::string what; // "record", "wait", "use", "synchronize"
  int device;
  int64_t stream;
  uint64_t number; // of the event; of "use", the address
};

struct Log {
  std::mutex mutex;
  std::vector<Entry> entries;
  uint64_t events = 0;
};

Log& stream_log() {
  static auto* log = new Log;
  return *log;
}

void write_log(const char* what, const c10::Stream& stream, uint64_t number) {
  const std::lock_guard<std::mutex> lock(stream_log().mutex);
  stream_log().entries.push_back({what, stream.device_index(), stream.id(), number});
}

// --- streams ---

constexpr int64_t kPoolSize = 32; // streams of the global pool are reused, as CUDA's are

struct Streams {
  std::mutex mutex;
  std::array<std::vector<Queue*>, kDevices> by_id; // the first is the default one, the pool's come next; never destroyed
  std::array<int64_t, kDevices> given{};
  std::set<std::pair<int, int64_t>> capturing;
};

Streams& streams() {
  static auto* all = new Streams;
  return *all;
}

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<int64_t, kDevices> current_streams{};

// Devices on which CUDA would have created a context, as cudaSetDevice does. A context takes hundreds of MB of a GPU.
std::array<std::atomic<bool>, kDevices> contexts{};

c10::DeviceIndex checked(c10::DeviceIndex device) {
  TORCH_CHECK(device < kDevices, "got device ", static_cast<int>(device), "; there are ", static_cast<int>(kDevices));
  return device < 0 ? current_device : device;
}

c10::Stream make_stream(c10::DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), id);
}

Queue& queue(c10::DeviceIndex device, int64_t id) {
  const std::lock_guard<std::mutex> lock(streams().mutex);
  auto& queues = streams().by_id[checked(device)];
  while (static_cast<int64_t>(queues.size()) <= std::max(id, kPoolSize)) {
    queues.push_back(new Queue(device, static_cast<int64_t>(queues.size())));
  }
  return *queues[id];
}

// Waits for the work of this thread's streams, before the host reads memory.
void drain_current() {
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
    queue(device, current_streams[device]).drain();
  }
}

// --- events ---

struct Event {
  MarkerPtr marker;
  uint64_t number;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kDevice, current_device};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kDevice, "got ", device, "; allowed is the double's");
    current_device = checked(device.index());
    contexts[current_device] = true;
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index() < 0 ? current_device : device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(checked(device.index()), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*isHighPriority*/) const override {
    const auto index = checked(device.index());
    const std::lock_guard<std::mutex> lock(streams().mutex);
    return make_stream(index, 1 + streams().given[index]++ % kPoolSize);
  }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    const auto index = checked(device.index());
    queue(index, 0);
    const std::lock_guard<std::mutex> lock(streams().mutex);
    auto& queues = streams().by_id[index];
    queues.push_back(new Queue(index, static_cast<int64_t>(queues.size())));
    return make_stream(index, queues.back()->id());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &queue_of(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return queue_of(stream).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    write_log("synchronize", stream, 0);
    queue_of(stream).drain();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const auto index = checked(device);
    std::vector<Queue*> queues;
    queue(index, 0);
    {
      const std::lock_guard<std::mutex> lock(streams().mutex);
      queues = streams().by_id[index];
    }
    for (auto* each : queues) {
      each->drain();
    }
  }
#ifdef DEVICE_DOUBLE_HAS_CAPTURE
  bool isStreamCapturing(const c10::Stream& stream) const override {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    return streams().capturing.count({stream.device_index(), stream.id()}) > 0;
  }
#endif

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag /*flag*/) const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(), "an event of device ", static_cast<int>(device), " was recorded on stream ",
        stream);
    if (*event == nullptr) {
      *event = new Event;
    }
    auto& own = *static_cast<Event*>(*event);
    {
      const std::lock_guard<std::mutex> lock(stream_log().mutex);
      own.number = ++stream_log().events;
    }
    own.marker = queue_of(stream).mark();
    write_log("record", stream, own.number);
    contexts[current_device] = true; // torch 2.11 goes back there by cudaSetDevice
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      const auto& own = *static_cast<Event*>(event);
      queue_of(stream).wait_for(own.marker);
      write_log("wait", stream, own.number);
      contexts[current_device] = true;
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->marker->is_reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      TORCH_CHECK(static_cast<Event*>(event)->marker->wait(), "the host waited for an event of a stream that is held");
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex /*device*/) const noexcept override {
    if (event != nullptr) {
      delete static_cast<Event*>(event);
      contexts[current_device] = true;
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- memory ---

constexpr unsigned char kNew = 0xCD; // in memory that was never written
constexpr unsigned char kFreed = 0xDB; // in freed memory
constexpr size_t kQuarantine = size_t{64} << 20; // bytes that are kept after they were freed, to detect writes to them

struct Block {
  size_t bytes;
  c10::DeviceIndex device;
  std::set<Queue*> users; // the stream on which it was allocated, and those it was recorded on
};

// Like CUDA's caching allocator: the next work of the stream on which memory was allocated may overwrite it as soon as it is
// freed. Other streams delay this only if they were recorded. This allocator overwrites the memory at that moment.
class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDevice, current_device);
    if (bytes == 0) {
      return {nullptr, nullptr, &Allocator::free, device};
    }
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 512, bytes) == 0, "out of memory: ", bytes, " bytes");
    std::memset(data, kNew, bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_[data] = {bytes, device.index(), {&queue(device.index(), current_streams[device.index()])}};
    return {data, data, &Allocator::free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &Allocator::free;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    drain_current();
    std::memcpy(to, from, bytes);
  }

  // Like the allocator of cudaMallocAsync, it refuses memory that is not its own.
  void use(const void* data, const c10::Stream& stream) {
    if (data == nullptr) {
      return;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(const_cast<void*>(data));
    TORCH_CHECK(found != blocks_.end(), "ptr not found in ptr_info: ", data, " is not of the double's allocator");
    found->second.users.insert(&queue_of(stream));
  }
  // The number of blocks that were written to after they had been freed.
  size_t written_after_free() {
    const std::lock_guard<std::mutex> lock(mutex_);
    size_t count = violations_;
    for (const auto& [data, bytes] : freed_) {
      count += is_written(data, bytes) ? 1 : 0;
    }
    return count;
  }

  static Allocator& instance() {
    static auto* allocator = new Allocator;
    return *allocator;
  }

 private:
  static void free(void* data) {
    if (data != nullptr) {
      instance().give_back(data);
    }
  }
  void give_back(void* data) {
    Block block;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = blocks_.find(data);
      block = std::move(found->second);
      blocks_.erase(found);
    }
    // The last of the streams overwrites it.
    auto left = std::make_shared<std::atomic<size_t>>(block.users.size());
    for (auto* user : block.users) {
      const auto reached = [this, left, data, bytes = block.bytes] {
        if (--*left == 0) {
          overwrite(data, bytes);
        }
      };
      if (user->mark()->is_reached()) {
        reached();
      } else {
        user->enqueue(reached);
      }
    }
  }
  void overwrite(void* data, size_t bytes) {
    std::memset(data, kFreed, bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    freed_.emplace_back(data, bytes);
    freed_bytes_ += bytes;
    while (freed_bytes_ > kQuarantine && freed_.size() > 1) {
      const auto [oldest, size] = freed_.front();
      freed_.pop_front();
      freed_bytes_ -= size;
      violations_ += is_written(oldest, size) ? 1 : 0;
      std::free(oldest);
    }
  }
  static bool is_written(const void* data, size_t bytes) {
    const auto* begin = static_cast<const unsigned char*>(data);
    return std::any_of(begin, begin + bytes, [](unsigned char byte) { return byte != kFreed; });
  }

  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  std::deque<std::pair<void*, size_t>> freed_;
  size_t freed_bytes_ = 0;
  size_t violations_ = 0;
};

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  write_log("use", stream, reinterpret_cast<uint64_t>(data.get()));
  Allocator::instance().use(data.get(), stream);
}

// An allocator of host memory that remembers which memory is "pinned".
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, std::max<size_t>(bytes, 1)) == 0, "out of memory: ", bytes, " bytes");
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_[data] = bytes;
    return {data, data, &PinnedAllocator::free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &PinnedAllocator::free;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool has(const void* data) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto next = blocks_.upper_bound(const_cast<void*>(data));
    if (next == blocks_.begin()) {
      return false;
    }
    --next;
    return static_cast<const char*>(data) < static_cast<const char*>(next->first) + std::max<size_t>(next->second, 1);
  }
  static PinnedAllocator& instance() {
    static auto* allocator = new PinnedAllocator;
    return *allocator;
  }

 private:
  static void free(void* data) {
    {
      const std::lock_guard<std::mutex> lock(instance().mutex_);
      instance().blocks_.erase(data);
    }
    std::free(data);
  }
  mutable std::mutex mutex_;
  std::map<void*, size_t> blocks_;
};

// --- hooks ---

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return kDevices;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current_device = checked(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, checked(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return PinnedAllocator::instance().has(data);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &PinnedAllocator::instance();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = storage.allocator()->allocate(bytes);
    if (storage.nbytes() > 0 && bytes > 0) {
      drain_current();
      std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

// --- kernels ---

c10::Device device_of(std::optional<c10::Device> device) {
  return {kDevice, checked(device ? device->index() : c10::DeviceIndex{-1})};
}

at::Tensor empty(
    c10::SymIntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device,
    std::optional<bool> /*pin*/,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_of(device));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &Allocator::instance(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device,
    std::optional<bool> /*pin*/) {
  const c10::DeviceGuard guard(device_of(device));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &Allocator::instance(), keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto& pinned = PinnedAllocator::instance();
  const auto by_itself = [&](const at::Tensor& tensor) { return !tensor.is_cpu() || pinned.has(tensor.const_data_ptr()); };
  if (non_blocking && by_itself(from) && by_itself(to)) {
    // The device makes this copy. torch's allocator of pinned memory waits for it before reuse; the device's own does not.
    const auto host = from.is_cpu() ? from : to.is_cpu() ? to : at::Tensor();
    const auto device = (to.is_cpu() ? from : to).device().index();
    queue_of(current_stream(device)).enqueue([host, to = on_host(to), from = on_host(from)] {
      const at::NoGradGuard no_grad;
      to.copy_(from);
    });
    return to;
  }
  drain_current();
  on_host(to).copy_(on_host(from));
  return to;
}

// Kernels that run on a stream and keep no tensor alive: those of fog's weighted sums.
at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  queue_of(current_stream(self.device().index())).enqueue_or_run([self = on_host(self), value] {
    const at::AutoDispatchBelowADInplaceOrView no_grad;
    self.fill_(value);
  });
  return self;
}

at::Tensor& addmv_out(
    const at::Tensor& self,
    const at::Tensor& matrix,
    const at::Tensor& vector,
    const at::Scalar& beta,
    const at::Scalar& alpha,
    at::Tensor& out) {
  TORCH_CHECK(out.numel() == matrix.size(0), "addmv: the double resizes no output");
  queue_of(current_stream(out.device().index()))
      .enqueue_or_run(
          [self = on_host(self), matrix = on_host(matrix), vector = on_host(vector), beta, alpha, out = on_host(out)]() mutable {
            const at::AutoDispatchBelowADInplaceOrView no_grad;
            at::addmv_out(out, self, matrix, vector, beta, alpha);
          });
  return out;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) {
    at::native::resize_(to, from.sizes());
  }
  return copy_from(from, to, false);
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
      offset ? std::make_optional(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(sizes), format);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::set_storage_cpu_(
      self, std::move(source), offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor& set_source_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_source_storage(at::Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {numel}, {});
}

at::Scalar local_scalar(const at::Tensor& self) {
  drain_current();
  return on_host(self).item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("fill_.Scalar", &fill);
  m.impl("addmv.out", &addmv_out);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_source_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_source_tensor);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("unfold", &at::native::unfold);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
}

// copy_from() handles these bits itself; torch would resolve them by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

// All other operations run on the host at once.
void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  drain_current();
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

} // namespace

Queue& queue_of(const c10::Stream& stream) {
  TORCH_CHECK(stream.device_type() == kDevice, "got stream ", stream, "; allowed is one of the double");
  return queue(stream.device_index(), stream.id());
}

c10::Stream current_stream(c10::DeviceIndex device) {
  const auto index = checked(device);
  return make_stream(index, current_streams[index]);
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().type() != kDevice) {
    return tensor;
  }
  auto host = at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
      tensor.options().device(c10::kCPU).requires_grad(false));
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

void bind_device(py::module_& module) {
  c10::SetAllocator(kDevice, &Allocator::instance());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  // A torch without devices does not register this class, the type of a backend's mem_allocator, in Python.
  py::class_<c10::Allocator, std::shared_ptr<c10::Allocator>>(module, "Allocator");
  const auto release_gil = py::call_guard<py::gil_scoped_release>();
  module.def("device_count", [] { return static_cast<int>(kDevices); });
  module.def("current_device", [] { return static_cast<int>(current_device); });
  module.def("set_device", [](int device) { Guard().setDevice({kDevice, static_cast<c10::DeviceIndex>(device)}); });
  module.def(
      "synchronize", [](int device) { Guard().synchronizeDevice(static_cast<c10::DeviceIndex>(device)); }, py::arg("device") = -1,
      release_gil);
  module.def("hold", [](int device, int64_t stream) { queue(static_cast<c10::DeviceIndex>(device), stream).hold(); });
  module.def("release", [](int device, int64_t stream) { queue(static_cast<c10::DeviceIndex>(device), stream).release(); });
  module.def("set_capturing", [](int device, int64_t stream, bool capturing) {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    if (capturing) {
      streams().capturing.insert({device, stream});
    } else {
      streams().capturing.erase({device, stream});
    }
  });
  module.def("stream_log", [] {
    const std::lock_guard<std::mutex> lock(stream_log().mutex);
    std::vector<std::tuple<std::string, int, int64_t, uint64_t>> entries;
    for (const auto& [what, device, stream, number] : stream_log().entries) {
      entries.emplace_back(what, device, stream, number);
    }
    return entries;
  });
  module.def("clear_stream_log", [] {
    const std::lock_guard<std::mutex> lock(stream_log().mutex);
    stream_log().entries.clear();
  });
  module.def("contexts", [] { return std::vector<bool>(contexts.begin(), contexts.end()); });
  module.def("forget_contexts", [] {
    for (auto& made : contexts) {
      made = false;
    }
  });
  module.def("host_view", &on_host); // the memory as a kernel sees it: nothing waits for it or keeps it alive
  module.def("foreign_memory", [](int64_t numel) { // zeros that another library has allocated on the device
    auto* data = std::calloc(static_cast<size_t>(numel), sizeof(float));
    const c10::Device device(kDevice, 0);
    return at::from_blob(data, {numel}, [](void* memory) { std::free(memory); }, at::TensorOptions(device), device);
  });
  module.def("written_after_free", [] { return Allocator::instance().written_after_free(); });
}

} // namespace device_double

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  device_double::bind_device(module);
  device_double::bind_delegate(module);
}
