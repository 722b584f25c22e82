// fog's own operations: exchanges with a rank's neighbors, and the gather of unequal tensors.
#include "process_group_fog.hpp"

#include <numeric>

#include <ATen/Functions.h>

#include "arguments.hpp"
#include "arithmetic.hpp"
#include "mpi/collectives/gather_concat.hpp"
#include "mpi/collectives/neighbor_allreduce.hpp"
#include "staging.hpp"

namespace fog {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

void ProcessGroupFog::check_plan(const NeighborPlan& plan) const {
  TORCH_CHECK_VALUE(
      plan.rank() == rank_ && plan.size() == size_, "plan: got a plan for rank ", plan.rank(), " of ", plan.size(),
      "; allowed is one for this rank, ", rank_, " of ", size_);
}

WorkPtr ProcessGroupFog::neighbor_allreduce(
    const at::Tensor& tensor, const NeighborPlan& plan, std::optional<at::Tensor> output, const CallOptions& options) {
  check_tensor("neighbor_allreduce", "tensor", tensor);
  check_plan(plan);
  check_weighted_sum(tensor.scalar_type());
  Staging staging;
  const auto staged_input = staging.input(tensor);
  at::Tensor staged_output;
  if (output) {
    check_output("neighbor_allreduce", "output", *output);
    check_same("neighbor_allreduce", "output", *output, tensor);
    TORCH_CHECK_VALUE(
        output->sizes() == tensor.sizes(), "neighbor_allreduce: output: got shape ", output->sizes(), "; allowed is that of the tensor, ",
        tensor.sizes());
    TORCH_CHECK_VALUE(
        !share_memory(*output, tensor), "neighbor_allreduce: output: shares memory with the tensor; pass another one");
    staged_output = staging.output(*output);
  } else {
    output = at::empty(tensor.sizes(), tensor.options().requires_grad(false));
    staged_output = *output;
  }
  auto operation = std::make_shared<mpi::NeighborAllreduce>(
      Signature::of(OpKind::kNeighborAllreduce, tensor), plan, staged_input.const_data_ptr(), staged_output.mutable_data_ptr(),
      static_cast<size_t>(tensor.numel()));
  operation->keep(staged_input);
  operation->keep(staged_output);
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::UNKNOWN, "fog:neighbor_allreduce", {tensor}, {*output}}, options);
}

WorkPtr ProcessGroupFog::gather_concat(
    const at::Tensor& tensor,
    OpKind kind,
    std::vector<int> sources,
    std::vector<int> destinations,
    const CallOptions& options) {
  const char* op = name_of(kind);
  check_tensor(op, "tensor", tensor);
  TORCH_CHECK_VALUE(tensor.dim() > 0, op, ": tensor: got one without dimensions; allowed are 1 or more, results are joined along dimension 0");
  Staging staging;
  const auto staged = staging.input(tensor);
  auto operation = std::make_shared<mpi::GatherConcat>(
      Signature::of(kind, tensor), staged, std::move(sources), std::move(destinations));
  return submit(
      operation,
      {kind == OpKind::kAllgatherConcat ? OpType::ALLGATHER : OpType::UNKNOWN,
       kind == OpKind::kAllgatherConcat ? "fog:allgather_concat" : "fog:neighbor_allgather",
       {tensor},
       {}},
      options);
}

WorkPtr ProcessGroupFog::neighbor_allgather(const at::Tensor& tensor, const NeighborPlan& plan, const CallOptions& options) {
  check_plan(plan);
  auto ranks_of = [](const std::vector<WeightedPeer>& peers) {
    std::vector<int> ranks;
    for (const auto& peer : peers) {
      ranks.push_back(peer.rank);
    }
    return ranks;
  };
  return gather_concat(tensor, OpKind::kNeighborAllgather, ranks_of(plan.sources()), ranks_of(plan.destinations()), options);
}

WorkPtr ProcessGroupFog::allgather_concat(const at::Tensor& tensor, const CallOptions& options) {
  std::vector<int> everyone(size_);
  std::iota(everyone.begin(), everyone.end(), 0);
  return gather_concat(tensor, OpKind::kAllgatherConcat, everyone, everyone, options);
}

} // namespace fog
