// fog's own kernels on a device: compiled once a device and process, launched on a stream.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "cuda/driver.hpp"
#include "cuda/kernel_types.hpp"

namespace fog::cuda {

// The kernels' source, as the run-time compiler gets it.
const char* kernel_source();

// The names of all kernels in it.
std::vector<std::string> kernel_names();

// Compiles and loads the kernels of a device if that has not been done, which takes a moment: the first launch does it too, but a
// stream that is being captured into a graph cannot. RuntimeError if they cannot be had.
//
// CUDA by itself loads a kernel when it is first started, and may wait then for all that runs: for a kernel that waits for another rank,
// in a send of NCCL or a window, for ever. So all are loaded here, if the driver can do that (CUDA 12.4 or later).
void prepare_kernels(const at::Device& device);

// Starts a kernel with at least one thread, and at most `threads` or what fills the device, after what the stream has. `arguments` point to
// its parameters. RuntimeError if it cannot be started.
void launch(const at::Device& device, const char* kernel, size_t threads, Handle stream, std::initializer_list<const void*> arguments);

// out[i] = weights[0] * rows[0][i] + ..., or with `mean` the rows' sum over their number, with the bits of weighted_sum() and, for integers,
// of linear_combination(). `out` may be one of the rows, of which there are at most kMostRows. Nothing is written where `*failed`, on the
// device, is not 0.
void launch_combine(
    const at::Device& device,
    c10::ScalarType dtype,
    void* out,
    c10::ArrayRef<const void*> rows,
    c10::ArrayRef<double> weights,
    bool mean,
    size_t numel,
    Handle stream,
    const int* failed = nullptr);

// The same of a sum that is on the device.
void launch_sum(const at::Device& device, c10::ScalarType dtype, const Sum* sum, size_t numel, Handle stream, const int* failed);

} // namespace fog::cuda
