#include "core/tensor_checks.hpp"

#include "core/overlap.hpp"

namespace fog {

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
  TORCH_CHECK_VALUE(tensors.size() == 1, op, ": ", argument, ": got ", tensors.size(), " tensors; allowed is one per rank");
  return tensors[0];
}

const std::vector<at::Tensor>& only_list(const char* op, const char* argument, const std::vector<std::vector<at::Tensor>>& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, op, ": ", argument, ": got ", lists.size(), " lists of tensors; allowed is one per rank");
  return lists[0];
}

void check_list(const char* op, const char* argument, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(!tensors.empty(), op, ": ", argument, ": got an empty list");
  for (const auto& tensor : tensors) {
    check_output(op, argument, tensor);
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == tensors[0].scalar_type() && tensor.sizes() == tensors[0].sizes(), op, ": ", argument,
        ": got tensors of different dtypes or shapes; allowed are the dtype and shape of the first tensor");
  }
}

} // namespace fog
