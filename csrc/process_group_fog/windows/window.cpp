#include "windows/window.hpp"

#include <algorithm>
#include <cmath>

#include <c10/util/Exception.h>

#include "core/linear_combination.hpp"
#include "core/failure.hpp"
#include "core/tensor_checks.hpp"
#include "windows/window_descriptions.hpp"

namespace fog {
namespace {

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

} // namespace

// Moving a tensor's storage comes before this: data_ stays where it is from here on.
Window::Window(Recipe recipe)
    : group_(std::move(recipe.group)),
      tensor_(std::move(recipe.tensor)),
      storage_(tensor_.storage()),
      name_(std::move(recipe.name)),
      in_neighbors_(std::move(recipe.in_neighbors)),
      out_neighbors_(std::move(recipe.out_neighbors)),
      timeout_(recipe.timeout),
      dtype_(tensor_.scalar_type()),
      numel_(tensor_.numel()),
      layout_(layout_of(tensor_)),
      bytes_(tensor_.nbytes()),
      data_(tensor_.const_data_ptr()) {}

std::unique_ptr<Window::Hold> Window::hold(std::vector<int> ranks, bool own, Milliseconds timeout) {
  lock(ranks, own, timeout);
  return std::make_unique<Hold>(shared_from_this(), std::move(ranks), own);
}

void Window::check_recipe(const Recipe& recipe) {
  constexpr const char* op = "win_create";
  check_output(op, "tensor", recipe.tensor, recipe.tensor.defined() ? recipe.tensor.device() : at::kCPU);
  check_linear_combination(op, recipe.tensor.scalar_type());
  TORCH_CHECK_VALUE(recipe.tensor.is_contiguous(), op, ": tensor: got one that is not contiguous; a window's tensor has to be");
  const auto& group = *recipe.group;
  const auto check_ranks = [&](const char* argument, const std::vector<int>& ranks) {
    for (const int rank : ranks) {
      TORCH_CHECK_VALUE(
          rank >= 0 && rank < group.size() && rank != group.rank, op, ": ", argument, ": got rank ", rank, "; allowed are ranks 0 to ",
          group.size() - 1, " of this group of ", group.size(), " except ", group.rank, ", which is this rank");
      TORCH_CHECK_VALUE(std::count(ranks.begin(), ranks.end(), rank) == 1, op, ": ", argument, ": got rank ", rank, " more than once");
    }
  };
  check_ranks("in_neighbors", recipe.in_neighbors);
  check_ranks("out_neighbors", recipe.out_neighbors);
}

void Window::check_neighbor(const char* op, const char* argument, int rank, bool in, bool out) const {
  if ((in && contains(in_neighbors_, rank)) || (out && contains(out_neighbors_, rank))) {
    return;
  }
  const auto allowed = in && out ? all_neighbors(in_neighbors_, out_neighbors_) : in ? in_neighbors_ : out_neighbors_;
  TORCH_CHECK_VALUE(
      false, op, ": ", argument, ": got rank ", rank, "; window '", name_, "' has ", list_ranks(allowed), " among the ",
      in && out ? "neighbors"
          : in  ? "in-neighbors"
                : "out-neighbors",
      " of rank ", group_->rank);
}

void Window::check_peers(const char* op, const char* argument, const Peers& peers, bool out) const {
  for (const auto& [rank, weight] : peers) {
    const int peer = rank;
    check_neighbor(op, argument, peer, !out, out);
    const auto same = [peer](const auto& other) { return other.first == peer; };
    TORCH_CHECK_VALUE(std::count_if(peers.begin(), peers.end(), same) == 1, op, ": ", argument, ": got rank ", rank, " more than once");
    TORCH_CHECK_VALUE(
        std::isfinite(weight), op, ": ", argument, ": got weight ", weight, " for rank ", rank, "; allowed are finite numbers");
  }
}

void Window::check_input(const char* op, const at::Tensor& tensor, double self_weight) const {
  check_tensor(op, "tensor", tensor, storage_.device());
  if (tensor.is_same(tensor_)) {
    check_tensor_in_place(op);
  } else {
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == dtype_ && tensor.numel() == numel_ && layout_of(tensor) == layout_, op, ": tensor: got ",
        layout_of(tensor), "; allowed is ", layout_, " as window '", name_, "' has it");
  }
  check_self_weight(op, self_weight);
  if (self_weight != 1) {
    check_output(op, "tensor", tensor, storage_.device());
  }
}

void Window::check_written(const char* op, const at::Tensor& tensor, int64_t offset) const {
  check_tensor(op, "tensor", tensor, storage_.device());
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == dtype_ && offset >= 0 && tensor.numel() <= numel_ - offset, op, ": tensor: got ", layout_of(tensor),
      " for element ", offset, "; window '", name_, "' is ", layout_);
}

void Window::check_self_weight(const char* op, double self_weight) const {
  TORCH_CHECK_VALUE(std::isfinite(self_weight), op, ": self_weight: got ", self_weight, "; allowed are finite numbers");
}

void Window::check_tensor_in_place(const char* op) const {
  TORCH_CHECK_VALUE(
      is_tensor_in_place(), op, ": the tensor of window '", name_,
      "' has other memory than when the window was made (was its .data assigned, or its dtype or size changed?)");
}

bool Window::is_tensor_in_place() const {
  return tensor_.has_storage() && tensor_.scalar_type() == dtype_ && tensor_.nbytes() == bytes_ && tensor_.is_contiguous() &&
      tensor_.const_data_ptr() == data_;
}

std::string Window::describe(const char* op) const {
  return c10::str(op, " of window '", name_, "' of group '", group_->name, "' on rank ", group_->rank);
}

std::exception_ptr Window::failure(const char* op, const std::string& reason) const {
  return backend_error("fog: " + describe(op) + ": " + reason);
}

void Window::fail(const char* op, const std::string& reason) const {
  std::rethrow_exception(failure(op, reason));
}

void Window::count_change(const at::Tensor& tensor) {
  if (!tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version(); // autograd has to know if it saved the tensor for a backward pass
  }
}

} // namespace fog
