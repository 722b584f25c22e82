// Several tensors that stand for one vector.
#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace fog {

// How many elements they have in all.
int64_t total_numel(const std::vector<at::Tensor>& tensors);

// Copies as collectives do: neither autograd nor the version counter sees it.
void copy_tensor(const at::Tensor& to, const at::Tensor& from);

// The memory of tensors of one dtype that lie one after the other, without gaps, in one storage, as a vector.
std::optional<at::Tensor> adjacent(const std::vector<at::Tensor>& tensors);

// Consecutive parts of `flat` with the shapes of the tensors.
std::vector<at::Tensor> views_of(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

// Copies consecutive parts of `flat` to the tensors.
void unflatten(const at::Tensor& flat, const std::vector<at::Tensor>& tensors);

// Those at these places of a list.
std::vector<at::Tensor> pick(const std::vector<at::Tensor>& tensors, const std::vector<size_t>& places);

} // namespace fog
