#include "staging.hpp"

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace fog {

void check_tensor(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined(), op, ": ", argument, ": got an undefined tensor");
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided, op, ": ", argument, ": got a tensor of layout ", tensor.layout(), "; allowed are dense tensors");
  TORCH_CHECK_VALUE(
      tensor.device().is_cpu(), op, ": ", argument, ": got a tensor on ", tensor.device(),
      "; this version of fog serves tensors on cpu (its CUDA transport does not exist yet)");
  TORCH_CHECK_VALUE(!tensor.is_conj() && !tensor.is_neg(), op, ": ", argument, ": got a lazily conjugated or negated tensor; call resolve_conj().resolve_neg() first");
}

void check_output(const char* op, const char* argument, const at::Tensor& tensor) {
  check_tensor(op, argument, tensor);
  TORCH_CHECK_VALUE(
      at::has_internal_overlap(tensor) != at::MemOverlap::Yes, op, ": ", argument,
      ": got a tensor whose elements share memory (an expanded one?); results cannot be written to it, call clone() first");
}

bool share_memory(const at::Tensor& one, const at::Tensor& other) {
  if (one.numel() == 0 || other.numel() == 0) {
    return false;
  }
  auto span = [](const at::Tensor& tensor) {
    int64_t last = 0;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      last += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    return std::make_pair(begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size()));
  };
  const auto [one_begin, one_end] = span(one);
  const auto [other_begin, other_end] = span(other);
  return one_begin < other_end && other_begin < one_end;
}

const at::Tensor& only_tensor(const char* op, const char* argument, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, op, ": ", argument, ": got ", tensors.size(), " tensors; allowed is one a rank");
  return tensors[0];
}

const std::vector<at::Tensor>& only_list(
    const char* op, const char* argument, const std::vector<std::vector<at::Tensor>>& lists) {
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

at::Tensor flatten(const std::vector<at::Tensor>& tensors) {
  at::AutoDispatchBelowADInplaceOrView guard;
  int64_t numel = 0;
  for (const auto& tensor : tensors) {
    numel += tensor.numel();
  }
  auto flat = at::empty({numel}, tensors[0].options());
  int64_t begin = 0;
  for (const auto& tensor : tensors) {
    flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()).copy_(tensor);
    begin += tensor.numel();
  }
  return flat;
}

void unflatten(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  at::AutoDispatchBelowADInplaceOrView guard;
  int64_t begin = 0;
  for (const auto& tensor : tensors) {
    tensor.copy_(flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
    begin += tensor.numel();
  }
}

at::Tensor Staging::input(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return tensor.contiguous();
}

at::Tensor Staging::output(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return tensor;
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  copies_.push_back({at::empty(tensor.sizes(), tensor.options()), tensor});
  return copies_.back().from;
}

at::Tensor Staging::in_place(const at::Tensor& tensor) {
  const auto staged = output(tensor);
  if (!staged.is_same(tensor)) {
    copy_tensor(staged, tensor);
  }
  return staged;
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
