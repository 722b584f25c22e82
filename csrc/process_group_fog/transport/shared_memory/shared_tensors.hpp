// Tensors in memory that the other ranks of this host can read where it is, so that exchanges copy nothing.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace fog {

// Gives out the arena's memory; ordinary memory where the system has none to share.
c10::Allocator& shared_allocator();

// An uninitialised, contiguous CPU tensor.
at::Tensor empty_shared(at::IntArrayRef sizes, c10::ScalarType dtype);

// Tensors of one dtype, one after the other in new memory of that kind.
at::Tensor flatten(const std::vector<at::Tensor>& tensors);

// Moves the storage of a CPU tensor, and so that of all its views; the old memory stays while a NumPy array may look at it.
// Throws ValueError for another device, or without storage.
void share(const at::Tensor& tensor);

// The same to `memory`, which has room for it, whatever kind of memory that is.
void move_storage(const at::Tensor& tensor, c10::DataPtr memory);

// Whether all of a tensor's storage is in shared memory.
bool is_shared(const at::Tensor& tensor);

} // namespace fog
