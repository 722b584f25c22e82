// Other backends that serve tensors of devices which fog has no transport of its own for: torch's NCCL for cuda.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace fog {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// What makes a group's backend for the tensors of a type of device. It must not communicate: ranks come to it at times of
// their own. With `eager` all ranks come together, and it may; the backend is to be connected next.
using DelegateFactory = std::function<BackendPtr(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    const c10::intrusive_ptr<c10d::Backend::Options>& options,
    const at::Device& device,
    bool eager)>;

// Sets the factory for a type of device, of groups that are made from now on and of those that have not asked for it yet; an empty
// one takes it away. For cpu, which fog serves itself, only if tensors are to go another way.
void set_delegate_factory(at::DeviceType type, DelegateFactory factory);

// What only Python can do for delegates.
struct DelegateSupport {
  // A copy of a delegate's options, of their own class.
  std::function<c10::intrusive_ptr<c10d::Backend::Options>(const BackendPtr&)> copy_options;
};
void set_delegate_support(DelegateSupport support);

// Lets fog's own groups of a delegate's operations be alone with it. Coalescing is a state of a c10d backend and not of a thread: a
// call of another thread meanwhile would become a part of the group. A group holds this as std::unique_lock, any other call, or a group
// that the program has begun, as std::shared_lock.
//
// Who waits gives up after the group's time-out with a DistBackendError. That is for programs whose threads connect in one order on
// this rank and in another elsewhere: a first call holds its place here until its peers have come.
class DelegateGate {
 public:
  explicit DelegateGate(c10::intrusive_ptr<c10d::Backend::Options> options) : options_(std::move(options)) {}

  // Any thread may unlock. Who waits for lock() keeps no call out: what is in may wait for ranks that wait for that call.
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

// A call of a delegate, which lasts as long as this.
struct DelegateCall {
  BackendPtr backend; // null if there is nobody to call
  std::shared_ptr<DelegateGate> gate;
  std::shared_lock<DelegateGate> turn;

  explicit operator bool() const {
    return backend != nullptr;
  }
  c10d::Backend* operator->() const {
    return backend.get();
  }
};

// One group's delegates, each made when a first tensor of its type of device comes. Thread-safe.
class DeviceBackends {
 public:
  // `prepare` is called with each delegate that is made, before it is used.
  DeviceBackends(
      c10::intrusive_ptr<c10d::Store> store,
      int rank,
      int size,
      c10::intrusive_ptr<c10d::Backend::Options> options,
      std::function<void(const BackendPtr&, const at::Device&)> prepare);
  ~DeviceBackends();

  // To call the delegate that serves all of these tensors; none if fog does. `op` is for messages.
  //
  // Throws ValueError if they are on several types of device, or on one that nobody serves, and DistBackendError after close().
  DelegateCall serving(const char* op, c10::ArrayRef<const at::Tensor*> tensors);
  // That of a device; none if fog serves it.
  DelegateCall serving(const char* op, const at::Device& device);
  // That of a type of device if there is one already.
  BackendPtr made(at::DeviceType type) const;
  // Those that there are already.
  std::vector<BackendPtr> made() const;
  // No more are made. Those that there are.
  std::vector<BackendPtr> close();

  // Makes the delegate of a device, unless there is one, and connects it: on all ranks of the group.
  void connect(const char* op, const at::Device& device);
  // Splits the delegates that were connected so: on all ranks of the group. `child` is the new group's; null on a rank outside.
  void split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10d::Backend::Options& options,
      DeviceBackends* child);

  // Between these two, operations of a delegate are one group of its operations.
  void start_coalescing();
  // The Work of the delegate's group; null if no operation of a delegate came.
  c10::intrusive_ptr<c10d::Work> end_coalescing();

 private:
  // One type of device.
  struct Slot {
    std::mutex making; // held while the delegate is being made: a second thread waits for it, and makes none
    BackendPtr delegate;
    std::shared_ptr<DelegateGate> gate;
    std::optional<at::Device> connected; // on all ranks together
  };

  DelegateCall call(const char* op, at::DeviceType type, BackendPtr delegate);
  BackendPtr find_or_make(const char* op, const at::Device& device, bool eager);
  Slot& slot(at::DeviceType type);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  const c10::intrusive_ptr<c10d::Backend::Options> options_; // the group's own: its time-out may change
  const std::function<void(const BackendPtr&, const at::Device&)> prepare_;
  mutable std::mutex mutex_;
  std::map<at::DeviceType, Slot> slots_; // never erased from
  bool is_closed_ = false;
  std::atomic<bool> is_coalescing_{false};
  std::optional<at::DeviceType> coalesced_type_; // of the first operation
  std::optional<DelegateCall> coalescing_; // of who has begun a group of operations for the program
};

} // namespace fog
