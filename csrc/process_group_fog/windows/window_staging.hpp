// Interface for the host copy of a window's device tensor.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>

#include <ATen/core/Tensor.h>

#include "core/deadline.hpp"

namespace fog {

// The only connection between windows, which do not know devices, and the device layer above them. The window of a
// device tensor calls it when values have to move between the two; the window of a CPU tensor has none. Python and c10d
// only know Window.
class WindowStaging {
 public:
  using Go = std::function<void(const at::Tensor& staged)>;
  using Fail = std::function<void(std::exception_ptr error)>;

  virtual ~WindowStaging() = default;

  // Throws if the program is currently using the device in a way that windows do not support.
  virtual void check(const char* op) const = 0;
  // Calls go() with the values of `tensor` (undefined if that is undefined) once they are on the host, in the order of
  // the submit() calls; or calls fail(). If the thread holds one of the window's mutexes, submit() waits for the copy.
  virtual void submit(const char* op, const at::Tensor& tensor, Deadline deadline, Go go, Fail fail) = 0;
  // Call after the operation on `staged` has succeeded and no rank reads `staged` any more. With `changed`, copies its
  // values to `tensor`.
  virtual void finish(const char* op, const at::Tensor& tensor, const at::Tensor& staged, bool changed, Deadline deadline) = 0;
  // Runs `combine`, whose result becomes the window's tensor or is returned as a clone. `reads`: it reads the tensor.
  virtual at::Tensor update(const char* op, bool reads, bool clone, const std::function<at::Tensor()>& combine, Deadline deadline) = 0;
  // Makes neighbors see the tensor as it will be after the operations that the program has queued on the device.
  virtual void publish(const char* op, Deadline deadline) = 0;
  // Call after a neighbor has written this into the tensor, from byte `offset` on.
  virtual void receive(size_t offset, const void* data, size_t bytes) = 0;
  // Waits until the device no longer reads the copy.
  virtual void drain(const char* op, Deadline deadline) = 0;
};

} // namespace fog
