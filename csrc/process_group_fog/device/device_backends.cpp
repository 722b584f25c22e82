#include "device/device_backends.hpp"

#include <chrono>
#include <utility>

#include <c10/util/Exception.h>

#include "core/deadline.hpp"
#include "core/python_lock.hpp"

namespace fog {
namespace {

struct Factories {
  std::mutex mutex;
  std::map<at::DeviceType, DelegateFactory> by_type;
};

Factories& factories() {
  // Never destroyed: a factory may hold Python objects, and the interpreter ends earlier.
  static auto* all = new Factories;
  return *all;
}

DelegateFactory factory_for(at::DeviceType type) {
  const std::lock_guard<std::mutex> lock(factories().mutex);
  const auto found = factories().by_type.find(type);
  return found == factories().by_type.end() ? nullptr : found->second;
}

// "cpu, cuda"
std::string served() {
  const std::lock_guard<std::mutex> lock(factories().mutex);
  std::string text = "cpu";
  for (const auto& [type, factory] : factories().by_type) {
    text += ", " + c10::DeviceTypeName(type, true);
  }
  return text;
}

} // namespace

void set_delegate_factory(at::DeviceType type, DelegateFactory factory) {
  const std::lock_guard<std::mutex> lock(factories().mutex);
  if (factory) {
    factories().by_type[type] = std::move(factory);
  } else {
    factories().by_type.erase(type);
  }
}

template <typename IsFree, typename Enter>
void DelegateGate::enter(const IsFree& is_free, const Enter& enter) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_free()) {
      enter();
      return;
    }
  }
  const auto patience = within_reach(options_->timeout);
  without_python_lock([&] {
    std::unique_lock<std::mutex> lock(mutex_);
    TORCH_CHECK_WITH(
        DistBackendError, changed_.wait_for(lock, patience, is_free), "waited ", patience.count(),
        " ms for another thread's operation on the same type of device, which has not returned yet: does it connect ranks whose threads "
        "make these calls in a different order?");
    enter();
  });
}

void DelegateGate::lock() {
  enter([this] { return calls_ == 0 && !is_grouped_; }, [this] { is_grouped_ = true; });
}

void DelegateGate::unlock() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_grouped_ = false;
  changed_.notify_all();
}

void DelegateGate::lock_shared() {
  enter([this] { return !is_grouped_; }, [this] { ++calls_; });
}

void DelegateGate::unlock_shared() {
  const std::lock_guard<std::mutex> lock(mutex_);
  --calls_;
  changed_.notify_all();
}

DeviceBackends::DeviceBackends(
    c10::intrusive_ptr<c10d::Store> store,
    int rank,
    int size,
    c10::intrusive_ptr<c10d::Backend::Options> options,
    std::function<void(const BackendPtr&, const at::Device&)> prepare)
    : store_(std::move(store)), rank_(rank), size_(size), options_(std::move(options)), prepare_(std::move(prepare)) {}

DeviceBackends::~DeviceBackends() {
  // The delegates' threads end with them, and may need the GIL for that.
  without_python_lock([this] {
    for (auto& [type, slot] : slots_) {
      slot.delegate.reset();
    }
  });
}

DelegateCall DeviceBackends::serving(const char* op, c10::ArrayRef<const at::Tensor*> tensors) {
  const at::Tensor* first = nullptr;
  for (const auto* tensor : tensors) {
    if (!tensor->defined()) {
      continue; // the operation itself reports it
    }
    first = first == nullptr ? tensor : first;
    TORCH_CHECK_VALUE(
        tensor->device().type() == first->device().type(), op, ": tensors: got some on ", first->device(), " and some on ",
        tensor->device(), "; allowed are those of one type of device in an operation");
  }
  return first == nullptr ? DelegateCall() : serving(op, first->device());
}

DelegateCall DeviceBackends::serving(const char* op, const at::Device& device) {
  if (device.is_cpu() && !is_coalescing_) {
    return {};
  }
  auto delegate = find_or_make(op, device, false);
  auto turn = delegate ? call(op, device.type(), std::move(delegate)) : DelegateCall();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_coalescing_) {
    if (!coalesced_type_) {
      coalesced_type_ = device.type();
      if (turn) {
        turn->startCoalescing();
        coalescing_.emplace(DelegateCall{turn.backend, turn.gate, std::shared_lock<DelegateGate>(*turn.gate)});
      }
    }
    TORCH_CHECK_VALUE(
        *coalesced_type_ == device.type(), op, ": tensors: got some on ", device, " among coalesced operations on ",
        c10::DeviceTypeName(*coalesced_type_, true), "; allowed is one type of device");
  }
  return turn;
}

DelegateCall DeviceBackends::call(const char* op, at::DeviceType type, BackendPtr delegate) {
  DelegateCall call{std::move(delegate), slot(type).gate, {}};
  try {
    call.turn = std::shared_lock<DelegateGate>(*call.gate);
  } catch (const c10::DistBackendError& error) {
    C10_THROW_ERROR(DistBackendError, c10::str(op, ": ", error.what_without_backtrace()));
  }
  check_open(op); // only now, as it may have waited long
  return call;
}

DeviceBackends::Slot& DeviceBackends::slot(at::DeviceType type) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& place = slots_[type];
  if (!place.gate) {
    place.gate = std::make_shared<DelegateGate>(options_);
  }
  return place;
}

BackendPtr DeviceBackends::find_or_make(const char* op, const at::Device& device, bool eager) {
  const auto type = device.type();
  if (auto found = made(type)) {
    return found;
  }
  const auto factory = factory_for(type);
  if (!factory) {
    TORCH_CHECK_VALUE(type == at::kCPU, op, ": tensors: got one on ", device, "; allowed are tensors on ", served());
    return nullptr;
  }
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  TORCH_CHECK_VALUE(
      !options_->enable_reconfigure, op, ": tensors: got one on ", device,
      "; allowed in a group with enable_reconfigure, whose ranks change, are tensors on the CPU");
#endif
  auto& place = slot(type);
  std::unique_lock<std::mutex> making(place.making, std::defer_lock);
  without_python_lock([&] { making.lock(); });
  if (auto found = made(type)) {
    return found; // another thread has created it meanwhile
  }
  auto delegate = factory(store_, rank_, size_, options_, device, eager);
  TORCH_CHECK_VALUE(delegate, op, ": no backend for tensors on ", device, " was made");
  prepare_(delegate, device);
  std::unique_lock<std::mutex> lock(mutex_);
  if (!closed_.empty()) {
    lock.unlock();
    without_python_lock([&] {
      delegate->shutdown();
      delegate.reset();
    });
    check_open(op); // throws
  }
  return place.delegate = std::move(delegate);
}

void DeviceBackends::check_open(const char* op) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_.empty()) {
    C10_THROW_ERROR(DistBackendError, c10::str("fog: ", op, ": ", closed_));
  }
}

BackendPtr DeviceBackends::made(at::DeviceType type) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = slots_.find(type);
  return found == slots_.end() ? nullptr : found->second.delegate;
}

std::vector<BackendPtr> DeviceBackends::made() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<BackendPtr> all;
  for (const auto& [type, slot] : slots_) {
    if (slot.delegate) {
      all.push_back(slot.delegate);
    }
  }
  return all;
}

std::vector<BackendPtr> DeviceBackends::close(const std::string& reason) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = closed_.empty() ? reason : closed_;
  }
  return made();
}

void DeviceBackends::connect(const char* op, const at::Device& device) {
  if (const auto delegate = find_or_make(op, device, true)) {
    delegate->setBoundDeviceId(device);
    delegate->eagerConnectSingleDevice(device);
  }
}

void DeviceBackends::start_coalescing() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_coalescing_ = true;
  coalesced_type_.reset();
  coalescing_.reset();
}

c10::intrusive_ptr<c10d::Work> DeviceBackends::end_coalescing() {
  std::optional<DelegateCall> delegate; // kept until the group has ended
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_coalescing_ = false;
    delegate = std::exchange(coalescing_, std::nullopt);
  }
  return delegate ? (*delegate)->endCoalescing() : nullptr;
}

} // namespace fog
