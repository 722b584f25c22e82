// What a window of a device's tensor needs besides: its copy on the host.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>

#include <ATen/core/Tensor.h>

#include "core/deadline.hpp"

namespace fog {

// The one seam between windows, which know no device, and devices, which stand above them: the window of a CPU tensor has none of these,
// and that of a device's tensor calls it where values have to move between the two. Python and c10d know a Window only.
class WindowStaging {
 public:
  using Go = std::function<void(const at::Tensor& staged)>;
  using Fail = std::function<void(std::exception_ptr error)>;

  virtual ~WindowStaging() = default;

  // Throws if the program is doing something with the device now that no window can take part in.
  virtual void check(const char* op) const = 0;
  // Calls go() with the values of `tensor` (nothing, if that is undefined) once they are on the host, in the order of these calls; or
  // fail(). A thread that holds one of the window's mutexes waits for that here.
  virtual void submit(const char* op, const at::Tensor& tensor, Deadline deadline, Go go, Fail fail) = 0;
  // The operation on `staged` has succeeded, and nobody reads that any more. With `changed` its values become those of `tensor`.
  virtual void finish(const char* op, const at::Tensor& tensor, const at::Tensor& staged, bool changed, Deadline deadline) = 0;
  // Runs `combine`, which returns what becomes the window's tensor, or the clone that is to be returned. `reads`: it reads the tensor.
  virtual at::Tensor update(const char* op, bool reads, bool clone, const std::function<at::Tensor()>& combine, Deadline deadline) = 0;
  // Neighbors see the tensor from now on as it will be after what the program has given the device.
  virtual void publish(const char* op, Deadline deadline) = 0;
  // A neighbor has written this into the tensor, from byte `offset` on.
  virtual void receive(size_t offset, const void* data, size_t bytes) = 0;
  // Waits until the device does not read the copy any more.
  virtual void drain(const char* op, Deadline deadline) = 0;
};

} // namespace fog
