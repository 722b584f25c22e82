// Delegates: other backends, for tensors of devices that fog has no transport for, such as torch's NCCL for cuda.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace fog {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Creates a group's backend for the tensors of a type of device. It must not communicate, because ranks call it at
// different times. With `eager`, all ranks call it together, and it may communicate; the backend is connected next.
using DelegateFactory = std::function<BackendPtr(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    const c10::intrusive_ptr<c10d::Backend::Options>& options,
    const at::Device& device,
    bool eager)>;

// Sets the factory for a type of device other than the CPU, which fog serves itself; an empty one removes it. It applies
// to new groups, and to groups that have not used this type yet.
void set_delegate_factory(at::DeviceType type, DelegateFactory factory);

// Gives fog's own groups of delegate operations exclusive use of the delegate. Coalescing is a state of a c10d backend,
// not of a thread: a call of another thread meanwhile would become part of the group. A group holds the gate as
// std::unique_lock; other calls, and groups that the program has begun, hold it as std::shared_lock.
//
// Waiting ends with a DistBackendError after the group's timeout. This happens if a program's threads connect in
// different orders on different ranks, because a first call holds the gate until its peers have come.
class DelegateGate {
 public:
  explicit DelegateGate(c10::intrusive_ptr<c10d::Backend::Options> options) : options_(std::move(options)) {}

  // Any thread may unlock. A thread that waits in lock() does not keep other calls out, because the current calls may
  // wait for ranks that need those calls.
  void lock();
  void unlock();
  void lock_shared();
  void unlock_shared();

 private:
  template <typename IsFree, typename Enter>
  void enter(const IsFree& is_free, const Enter& enter);

  const c10::intrusive_ptr<c10d::Backend::Options> options_; // the group's own
  std::mutex mutex_;
  std::condition_variable changed_;
  int calls_ = 0;
  bool is_grouped_ = false;
};

// A call of a delegate; holds the gate until it is destroyed.
struct DelegateCall {
  BackendPtr backend; // null if there is no delegate to call
  std::shared_ptr<DelegateGate> gate;
  std::shared_lock<DelegateGate> turn;

  explicit operator bool() const {
    return backend != nullptr;
  }
  c10d::Backend* operator->() const {
    return backend.get();
  }
};

// The delegates of one group. Each is created for the first tensor of its type of device. Thread-safe.
class DeviceBackends {
 public:
  // `prepare` is called with each new delegate before it is used.
  DeviceBackends(
      c10::intrusive_ptr<c10d::Store> store,
      int rank,
      int size,
      c10::intrusive_ptr<c10d::Backend::Options> options,
      std::function<void(const BackendPtr&, const at::Device&)> prepare);
  ~DeviceBackends();

  // Returns the call of the delegate that serves all of these tensors; empty if fog does. `op` is for error messages.
  //
  // Throws ValueError if they are on several types of device, or on one that no backend serves, and DistBackendError
  // after close().
  DelegateCall serving(const char* op, c10::ArrayRef<const at::Tensor*> tensors);
  // Returns the call of a device's delegate; empty if fog serves the device.
  DelegateCall serving(const char* op, const at::Device& device);
  // The delegate of a type of device, if it exists.
  BackendPtr made(at::DeviceType type) const;
  // All delegates that exist.
  std::vector<BackendPtr> made() const;
  // Ends the use of delegates; later operations throw a DistBackendError with this reason. Returns the existing ones.
  std::vector<BackendPtr> close(const std::string& reason = "the group was shut down or aborted");

  // Creates the delegate of a device, unless it exists, and connects it. Called on all ranks of the group.
  void connect(const char* op, const at::Device& device);

  // Between these two calls, the operations of a delegate form one group.
  void start_coalescing();
  // Returns the Work of the delegate's group; null if no delegate was called.
  c10::intrusive_ptr<c10d::Work> end_coalescing();

 private:
  // The state of one type of device.
  struct Slot {
    // held while the delegate is created: a second thread waits for it instead of creating another one
    std::mutex making;
    BackendPtr delegate;
    std::shared_ptr<DelegateGate> gate;
  };

  DelegateCall call(const char* op, at::DeviceType type, BackendPtr delegate);
  BackendPtr find_or_make(const char* op, const at::Device& device, bool eager);
  Slot& slot(at::DeviceType type);
  void check_open(const char* op) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  const c10::intrusive_ptr<c10d::Backend::Options> options_; // the group's own, because its timeout may change
  const std::function<void(const BackendPtr&, const at::Device&)> prepare_;
  mutable std::mutex mutex_;
  std::map<at::DeviceType, Slot> slots_; // entries are never erased
  std::string closed_; // the reason, after close()
  std::atomic<bool> is_coalescing_{false};
  std::optional<at::DeviceType> coalesced_type_; // type of device of the first operation
  std::optional<DelegateCall> coalescing_; // the call that has begun a group of operations for the program
};

} // namespace fog
