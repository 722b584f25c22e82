// The checks of a Window's arguments and state, and its error messages.

#include <algorithm>
#include <cmath>

#include <c10/util/Exception.h>

#include "core/linear_combination.hpp"
#include "core/failure.hpp"
#include "core/names.hpp"
#include "core/tensor_checks.hpp"
#include "windows/window_legs.hpp"

namespace fog {
void Window::check_config(const WindowConfig& config) {
  constexpr const char* op = "win_create";
  check_output(op, "tensor", config.tensor, config.tensor.defined() ? config.tensor.device() : at::kCPU);
  check_linear_combination(op, config.tensor.scalar_type());
  TORCH_CHECK_VALUE(config.tensor.is_contiguous(), op, ": tensor: got one that is not contiguous; a window's tensor has to be");
  const auto& group = *config.group;
  const auto check_ranks = [&](const char* argument, const std::vector<int>& ranks) {
    for (const int rank : ranks) {
      TORCH_CHECK_VALUE(
          rank >= 0 && rank < group.size() && rank != group.rank, op, ": ", argument, ": got rank ", rank, "; allowed are ranks 0 to ",
          group.size() - 1, " of this group of ", group.size(), " except ", group.rank, ", which is this rank");
      TORCH_CHECK_VALUE(std::count(ranks.begin(), ranks.end(), rank) == 1, op, ": ", argument, ": got rank ", rank, " more than once");
    }
  };
  check_ranks("in_neighbors", config.in_neighbors);
  check_ranks("out_neighbors", config.out_neighbors);
}

Window::Neighbor& Window::neighbor(const char* op, const char* argument, int rank, bool in, bool out) const {
  for (const auto& neighbor : neighbors_) {
    if (neighbor->rank == rank && ((in && neighbor->in) || (out && neighbor->out))) {
      return *neighbor;
    }
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
    neighbor(op, argument, peer, !out, out);
    const auto same = [peer](const auto& other) { return other.first == peer; };
    TORCH_CHECK_VALUE(std::count_if(peers.begin(), peers.end(), same) == 1, op, ": ", argument, ": got rank ", rank, " more than once");
    TORCH_CHECK_VALUE(
        std::isfinite(weight), op, ": ", argument, ": got weight ", weight, " for rank ", rank, "; allowed are finite numbers");
  }
}

void Window::check_input(const char* op, const at::Tensor& tensor, double self_weight) const {
  check_tensor(op, "tensor", tensor, device_);
  if (tensor.is_same(tensor_)) {
    check_tensor_in_place(op);
  } else {
    TORCH_CHECK_VALUE(
        tensor.scalar_type() == values_.dtype && values_.numel == static_cast<size_t>(tensor.numel()) && layout_of(tensor) == layout_,
        op, ": tensor: got ", layout_of(tensor), "; allowed is ", layout_, " as window '", name_, "' has it");
  }
  check_self_weight(op, self_weight);
  if (self_weight != 1) {
    check_output(op, "tensor", tensor, device_);
  }
}

void Window::check_written(const char* op, const at::Tensor& tensor, int64_t offset) const {
  check_tensor(op, "tensor", tensor, device_);
  const auto numel = static_cast<int64_t>(values_.numel);
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == values_.dtype && offset >= 0 && tensor.numel() <= numel - offset, op, ": tensor: got ", layout_of(tensor),
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
  return tensor_.has_storage() && tensor_.scalar_type() == values_.dtype && tensor_.nbytes() == values_.bytes &&
      tensor_.is_contiguous() && tensor_.const_data_ptr() == data_;
}

void Window::check_open(const char* op) const {
  if (closed_) {
    const std::lock_guard<std::mutex> lock(state_);
    fail(op, "the window " + closed_reason_);
  }
}

void Window::check_abandoned(const char* op) const {
  if (abandoned_) {
    check_open(op);
  }
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

std::string Window::why_gone(const Neighbor& neighbor) const {
  const std::lock_guard<std::mutex> lock(state_);
  return group_->describe_member(neighbor.rank) + ' ' + neighbor.how;
}

void Window::refused(const char* op, const std::exception& refusal) const {
  fail(op, c10::str("the operation has to wait, and the system refuses a thread for that: ", message_of(refusal)));
}

} // namespace fog
