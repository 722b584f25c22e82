#include "backend/staging.hpp"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "transport/shared_memory/shared_tensors.hpp"

namespace fog {

at::Tensor Staging::input(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return kept(tensor);
  }
  const auto copy = empty_shared(tensor.sizes(), tensor.scalar_type());
  copy_tensor(copy, tensor);
  return kept(copy);
}

at::Tensor Staging::output(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return kept(tensor);
  }
  copies_.push_back({empty_shared(tensor.sizes(), tensor.scalar_type()), tensor});
  return kept(copies_.back().from);
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
  return kept(own ? *own : flatten(tensors));
}

at::Tensor Staging::output(const std::vector<at::Tensor>& tensors) {
  if (tensors.size() == 1) {
    return output(tensors[0]);
  }
  if (const auto own = adjacent(tensors)) {
    return kept(*own);
  }
  const auto flat = empty_shared({total_numel(tensors)}, tensors[0].scalar_type());
  const auto views = views_of(flat, tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    copies_.push_back({views[i], tensors[i]});
  }
  return kept(flat);
}

void Staging::attach(Operation& operation) const {
  for (const auto& tensor : kept_) {
    operation.keep(tensor);
  }
  operation.set_epilogue(copy_back());
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
