#include "core/tensor_lists.hpp"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace fog {

int64_t total_numel(const std::vector<at::Tensor>& tensors) {
  int64_t numel = 0;
  for (const auto& tensor : tensors) {
    numel += tensor.numel();
  }
  return numel;
}

void copy_tensor(const at::Tensor& to, const at::Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView guard;
  to.copy_(from);
}

std::optional<at::Tensor> adjacent(const std::vector<at::Tensor>& tensors) {
  const at::Tensor* first = nullptr; // the first tensor that has elements
  const char* end = nullptr;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) {
      continue;
    }
    if (!tensor.is_contiguous() ||
        (first != nullptr && (tensor.const_data_ptr() != end || !tensor.storage().is_alias_of(first->storage())))) {
      return std::nullopt;
    }
    first = first == nullptr ? &tensor : first;
    end = static_cast<const char*>(tensor.const_data_ptr()) + tensor.nbytes();
  }
  if (first == nullptr) {
    return std::nullopt;
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return first->as_strided({total_numel(tensors)}, {1});
}

std::vector<at::Tensor> pick(const std::vector<at::Tensor>& tensors, const std::vector<size_t>& places) {
  std::vector<at::Tensor> picked;
  picked.reserve(places.size());
  for (const size_t place : places) {
    picked.push_back(tensors[place]);
  }
  return picked;
}

void unflatten(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  const auto views = views_of(flat, tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    copy_tensor(tensors[i], views[i]);
  }
}

std::vector<at::Tensor> views_of(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  at::AutoDispatchBelowADInplaceOrView guard;
  std::vector<at::Tensor> views;
  views.reserve(tensors.size());
  int64_t begin = 0;
  for (const auto& tensor : tensors) {
    views.push_back(flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
  return views;
}

} // namespace fog
