// Tensors in memory that the other ranks of this host can read in place, so that exchanges copy nothing.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace fog {

// Allocates from the arena, or ordinary memory if the system cannot share memory.
c10::Allocator& shared_allocator();

// Returns an uninitialised, contiguous CPU tensor.
at::Tensor empty_shared(at::IntArrayRef sizes, c10::ScalarType dtype);

// Copies tensors of one dtype, one after the other, to new shared memory.
at::Tensor flatten(const std::vector<at::Tensor>& tensors);

// Moves the storage of a CPU tensor, and with it all views, to shared memory. The old memory stays while a NumPy array
// may refer to it. Throws ValueError for another device, or for a tensor without storage.
void share(const at::Tensor& tensor);

// Moves the storage to `memory`, which may be of any kind and is large enough.
void move_storage(const at::Tensor& tensor, c10::DataPtr memory);

// Returns whether the whole storage of a tensor is in shared memory.
bool is_shared(const at::Tensor& tensor);

} // namespace fog
