// The fake device: torch's PrivateUse1 as a GPU whose memory is the host's.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/utils/pybind.h>

#include "streams.hpp"

namespace device_double {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;

// The object to which a stream's native handle points.
Queue& queue_of(const c10::Stream& stream);
c10::Stream current_stream(c10::DeviceIndex device);

// Returns a host tensor in the memory of a device tensor, which it does not keep alive; host tensors are returned unchanged.
at::Tensor on_host(const at::Tensor& tensor);

void bind_device(pybind11::module_& module);
void bind_delegate(pybind11::module_& module);

} // namespace device_double
