#include "backend/staging.hpp"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "transport/shared_memory/shared_tensors.hpp"

namespace fog {

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
