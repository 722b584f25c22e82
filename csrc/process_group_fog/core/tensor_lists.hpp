// Lists of tensors that represent one vector.
#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace fog {

// Returns the total number of elements.
int64_t total_numel(const std::vector<at::Tensor>& tensors);

// Copies as collectives do: neither autograd nor the version counter notices.
void copy_tensor(const at::Tensor& to, const at::Tensor& from);

// Returns the memory of the tensors as a vector if they have one dtype and lie one after the other, without gaps, in
// one storage.
std::optional<at::Tensor> adjacent(const std::vector<at::Tensor>& tensors);

// Returns consecutive parts of `flat` with the shapes of the tensors.
std::vector<at::Tensor> views_of(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

// Copies consecutive parts of `flat` to the tensors.
void unflatten(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

// Returns the tensors at these places of a list.
std::vector<at::Tensor> pick(const std::vector<at::Tensor>& tensors, const std::vector<size_t>& places);

} // namespace fog
