#include "staging.hpp"

#include <optional>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "overlap.hpp"
#include "shared_tensors.hpp"

namespace fog {
namespace {

int64_t total_numel(const std::vector<at::Tensor>& tensors) {
  int64_t numel = 0;
  for (const auto& tensor : tensors) {
    numel += tensor.numel();
  }
  return numel;
}

} // namespace

void check_tensor(const char* op, const char* argument, const at::Tensor& tensor, const at::Device& device) {
  TORCH_CHECK_VALUE(tensor.defined(), op, ": ", argument, ": got an undefined tensor");
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided, op, ": ", argument, ": got a tensor of layout ", tensor.layout(), "; allowed are dense tensors");
  TORCH_CHECK_VALUE(
      tensor.device() == device, op, ": ", argument, ": got a tensor on ", tensor.device(), "; allowed are tensors on ", device);
  TORCH_CHECK_VALUE(
      !tensor.is_conj() && !tensor.is_neg(), op, ": ", argument,
      ": got a lazily conjugated or negated tensor; call resolve_conj().resolve_neg() first");
}

void check_output(const char* op, const char* argument, const at::Tensor& tensor, const at::Device& device) {
  check_tensor(op, argument, tensor, device);
  TORCH_CHECK_VALUE(
      !shares_with_itself(tensor), op, ": ", argument,
      ": got a tensor whose elements share memory (an expanded one?); results cannot be written to it, call clone() first");
}

const at::Tensor& only_tensor(const char* op, const char* argument, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, op, ": ", argument, ": got ", tensors.size(), " tensors; allowed is one a rank");
  return tensors[0];
}

const std::vector<at::Tensor>& only_list(const char* op, const char* argument, const std::vector<std::vector<at::Tensor>>& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, op, ": ", argument, ": got ", lists.size(), " lists of tensors; allowed is one a rank");
  return lists[0];
}

void check_list(const char* op, const char* argument, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), op, ": ", argument, ": got an empty list");
  for (const auto& tensor : tensors) {
    check_output(op, argument, tensor);
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == tensors[0].scalar_type() && tensor.sizes() == tensors[0].sizes(), op, ": ", argument,
        ": got tensors of different dtype or shape; allowed are those of the first one");
  }
}

void copy_tensor(const at::Tensor& to, const at::Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView guard;
  to.copy_(from);
}

std::optional<at::Tensor> adjacent(const std::vector<at::Tensor>& tensors) {
  const at::Tensor* first = nullptr; // that has elements
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

at::Tensor flatten(const std::vector<at::Tensor>& tensors) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto flat = empty_shared({total_numel(tensors)}, tensors[0].scalar_type());
  const auto views = views_of(flat, tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    views[i].copy_(tensors[i]);
  }
  return flat;
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

at::Tensor Staging::input(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView guard;
  if (tensor.is_contiguous()) {
    return tensor;
  }
  const auto copy = empty_shared(tensor.sizes(), tensor.scalar_type());
  copy.copy_(tensor);
  return copy;
}

at::Tensor Staging::output(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return tensor;
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  copies_.push_back({empty_shared(tensor.sizes(), tensor.scalar_type()), tensor});
  return copies_.back().from;
}

at::Tensor Staging::in_place(const at::Tensor& tensor) {
  const auto staged = output(tensor);
  if (!staged.is_same(tensor)) {
    copy_tensor(staged, tensor);
  }
  return staged;
}

at::Tensor Staging::input(const std::vector<at::Tensor>& tensors) {
  if (tensors.size() == 1) {
    return input(tensors[0]);
  }
  const auto own = adjacent(tensors);
  return own ? *own : flatten(tensors);
}

at::Tensor Staging::output(const std::vector<at::Tensor>& tensors) {
  if (tensors.size() == 1) {
    return output(tensors[0]);
  }
  if (const auto own = adjacent(tensors)) {
    return *own;
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto flat = empty_shared({total_numel(tensors)}, tensors[0].scalar_type());
  const auto views = views_of(flat, tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    copies_.push_back({views[i], tensors[i]});
  }
  return flat;
}

std::function<void()> Staging::copy_back() const {
  if (copies_.empty()) {
    return nullptr;
  }
  return [copies = copies_] {
    for (const auto& [from, to] : copies) {
      copy_tensor(to, from);
    }
  };
}

} // namespace fog
