// allreduce, reduce and reduce_scatter in their forms.
#include "backend/process_group_fog.hpp"

#include "backend/arguments.hpp"
#include "core/arithmetic.hpp"
#include "device/neighbors.hpp"
#include "collectives/allreduce.hpp"
#include "collectives/reduce.hpp"
#include "collectives/reduce_scatter.hpp"
#include "core/overlap.hpp"
#include "backend/staging.hpp"

namespace fog {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

namespace {

// Of one or several that are in flight together.
void check_reduce_scatter_base(
    c10::ArrayRef<at::Tensor> outputs, c10::ArrayRef<at::Tensor> inputs, const c10d::ReduceOp& op, int rank, int size) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_output("reduce_scatter_tensor", "output", outputs[i]);
    check_tensor("reduce_scatter_tensor", "input", inputs[i]);
    check_same("reduce_scatter_tensor", "output", outputs[i], inputs[i]);
    check_numel("reduce_scatter_tensor", "input", inputs[i], outputs[i].numel() * size);
    check_reduction(op.op_, inputs[i].scalar_type());
  }
  // Only this rank reads its own part of the input.
  check_disjoint("reduce_scatter_tensor", {"output", outputs}, {"input", inputs}, [&](size_t output, size_t input) {
    return output == input && is_part(outputs[output], inputs[input], rank, size);
  });
}

} // namespace

WorkPtr ProcessGroupFog::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  if (const auto delegate = delegate_of("allreduce", tensors)) {
    const bool is_sparse = tensors[0].defined() && tensors[0].layout() == at::kSparse;
    return is_sparse ? delegate->allreduce_sparse(tensors, options) : delegate->allreduce(tensors, options);
  }
  if (!tensors.empty() && tensors[0].defined() && tensors[0].layout() == at::kSparse) {
    return allreduce_sparse(tensors, options);
  }
  if (tensors.size() == 1) {
    return allreduce_named(tensors[0], options.reduceOp, call_options(options));
  }
  // All tensors of all ranks are reduced to one result, which every tensor gets.
  check_list("allreduce", "tensors", tensors);
  check_disjoint("allreduce", {"tensors", tensors}, {});
  TORCH_CHECK_VALUE(
      options.reduceOp.op_ != c10d::ReduceOp::AVG, "allreduce: tensors: got ", tensors.size(), "; with AVG allowed is one a rank");
  const auto reduced = flatten({tensors[0]});
  const auto signature = reduction_signature(OpKind::kAllreduce, tensors[0], options.reduceOp);
  const double factor = factor_of(options.reduceOp);
  const auto local_op =
      options.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM ? c10d::ReduceOp::SUM : options.reduceOp.op_; // the factor comes later
  Staging staging;
  for (size_t i = 1; i < tensors.size(); ++i) {
    const auto staged = staging.input(tensors[i]);
    fog::reduce(
        local_op, reduced.scalar_type(), reduced.mutable_data_ptr(), {reduced.const_data_ptr(), staged.const_data_ptr()}, {},
        static_cast<size_t>(reduced.numel()));
  }
  auto operation = std::make_shared<Allreduce>(signature, part_of(reduced).data, reduced.numel(), factor);
  operation->keep(reduced);
  operation->set_epilogue([reduced, tensors] {
    for (const auto& tensor : tensors) {
      unflatten(reduced, {tensor});
    }
  });
  return submit(operation, {OpType::ALLREDUCE, "fog:all_reduce", tensors, tensors}, call_options(options));
}

WorkPtr ProcessGroupFog::allreduce_named(at::Tensor& tensor, const c10d::ReduceOp& op, const CallOptions& options) {
  check_output("allreduce", "tensor", tensor, where_is(tensor));
  const auto signature = reduction_signature(OpKind::kAllreduce, tensor, op);
  if (const auto device = neighbors_of("allreduce", tensor)) {
    compare_everywhere(signature, options);
    return device->collective(
        "allreduce", "fog:all_reduce", OpType::ALLREDUCE, tensor, [&](c10d::Backend& delegate, std::vector<at::Tensor>& tensors) {
          c10d::AllreduceOptions given;
          given.reduceOp = op;
          given.timeout = options.timeout.value_or(c10d::kUnsetTimeout);
          return delegate.allreduce(tensors, given);
        });
  }
  return allreduce_among(signature, "fog:all_reduce", tensor, op, {}, options);
}

WorkPtr ProcessGroupFog::allreduce_among(
    Signature signature,
    const char* title,
    at::Tensor& tensor,
    const c10d::ReduceOp& op,
    std::vector<int> members,
    const CallOptions& options) {
  Staging staging;
  const double factor = factor_of(op);
  const auto staged = staging.in_place(tensor);
  auto operation = std::make_shared<Allreduce>(signature, part_of(staged).data, staged.numel(), factor, std::move(members));
  operation->keep(staged);
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::ALLREDUCE, title, {tensor}, {tensor}}, options);
}

WorkPtr ProcessGroupFog::allreduce_coalesced(std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) {
  if (const auto delegate = delegate_of("allreduce_coalesced", tensors)) {
    return delegate->allreduce_coalesced(tensors, options);
  }
  TORCH_CHECK_VALUE(!tensors.empty(), "allreduce_coalesced: tensors: got an empty list");
  for (const auto& tensor : tensors) {
    check_output("allreduce_coalesced", "tensors", tensor);
    check_same("allreduce_coalesced", "tensors", tensor, tensors[0]);
  }
  check_disjoint("allreduce_coalesced", {"tensors", tensors}, {});
  const auto flat = flatten(tensors); // one exchange
  const auto signature = reduction_signature(OpKind::kAllreduce, flat, options.reduceOp);
  auto operation = std::make_shared<Allreduce>(signature, part_of(flat).data, flat.numel(), factor_of(options.reduceOp));
  operation->keep(flat);
  operation->set_epilogue([flat, tensors] { unflatten(flat, tensors); });
  return submit(operation, {OpType::ALLREDUCE_COALESCED, "fog:all_reduce_coalesced", tensors, tensors}, call_options(options));
}

WorkPtr ProcessGroupFog::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) {
  if (const auto delegate = delegate_of("reduce", tensors)) {
    return delegate->reduce(tensors, options);
  }
  const auto tensor = only_tensor("reduce", "tensors", tensors);
  check_output("reduce", "tensors", tensor);
  check_root("reduce", options.rootRank);
  auto signature = reduction_signature(OpKind::kReduce, tensor, options.reduceOp);
  signature.root = static_cast<int32_t>(options.rootRank);
  Staging staging;
  const auto staged = rank_ == options.rootRank ? staging.in_place(tensor) : staging.input(tensor);
  auto operation = std::make_shared<Reduce>(signature, part_of(staged).data, staged.numel(), factor_of(options.reduceOp));
  operation->keep(staged);
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::REDUCE, "fog:reduce", tensors, tensors}, call_options(options));
}

WorkPtr ProcessGroupFog::reduce_scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& input_lists, const c10d::ReduceScatterOptions& options) {
  if (const auto delegate = delegate_of("reduce_scatter", outputs, input_lists)) {
    return delegate->reduce_scatter(outputs, input_lists, options);
  }
  const auto output = only_tensor("reduce_scatter", "outputs", outputs);
  const auto& inputs = only_list("reduce_scatter", "inputs", input_lists);
  check_output("reduce_scatter", "outputs", output);
  TORCH_CHECK_VALUE(
      static_cast<int>(inputs.size()) == size_, "reduce_scatter: inputs: got ", inputs.size(),
      " tensors; allowed is one for each of the ", size_, " ranks");
  Staging staging;
  std::vector<at::Tensor> staged_inputs;
  std::vector<const void*> data;
  std::vector<size_t> bytes;
  int64_t numel = 0;
  for (const auto& input : inputs) {
    check_tensor("reduce_scatter", "inputs", input);
    check_same("reduce_scatter", "inputs", input, output);
    staged_inputs.push_back(staging.input(input));
    data.push_back(staged_inputs.back().const_data_ptr());
    bytes.push_back(staged_inputs.back().nbytes());
    numel += input.numel();
  }
  check_numel("reduce_scatter", "outputs", output, inputs[rank_].numel());
  check_disjoint("reduce_scatter", {"outputs", output}, {"inputs", inputs}, [&](size_t, size_t place) {
    return static_cast<int>(place) == rank_ && same_memory(inputs[place], output);
  });
  const auto staged_output = staging.output(output);
  auto signature = reduction_signature(OpKind::kReduceScatter, output, options.reduceOp);
  signature.numel = numel; // outputs may differ from rank to rank, the whole does not
  signature.dims = 1;
  signature.shape = {numel};
  auto operation = std::make_shared<ReduceScatter>(
      signature, std::move(data), std::move(bytes), part_of(staged_output).data, factor_of(options.reduceOp));
  operation->keep(staged_output);
  for (const auto& staged : staged_inputs) {
    operation->keep(staged);
  }
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::REDUCE_SCATTER, "fog:reduce_scatter", inputs, outputs}, call_options(options));
}

WorkPtr ProcessGroupFog::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  if (const auto delegate = delegate_of("reduce_scatter_tensor", output, input)) {
    return delegate->_reduce_scatter_base(output, input, options);
  }
  check_reduce_scatter_base(output, input, options.reduceOp, rank_, size_);
  Staging staging;
  const auto staged_input = staging.input(input);
  const auto staged_output = staging.output(output);
  std::vector<const void*> data;
  std::vector<size_t> bytes;
  for (const auto& part : parts_of(staged_input, size_)) {
    data.push_back(part.data);
    bytes.push_back(part.bytes);
  }
  auto operation = std::make_shared<ReduceScatter>(
      reduction_signature(OpKind::kReduceScatter, input, options.reduceOp), std::move(data), std::move(bytes),
      part_of(staged_output).data, factor_of(options.reduceOp));
  operation->keep(staged_input);
  operation->keep(staged_output);
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::_REDUCE_SCATTER_BASE, "fog:_reduce_scatter_base", {input}, {output}}, call_options(options));
}

WorkPtr ProcessGroupFog::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& options) {
  if (const auto delegate = delegate_of("reduce_scatter_tensor_coalesced", outputs, inputs)) {
    return delegate->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  TORCH_CHECK_VALUE(
      outputs.size() == inputs.size(), "reduce_scatter_tensor_coalesced: outputs: got ", outputs.size(),
      " tensors; allowed is one for each of the ", inputs.size(), " inputs");
  check_reduce_scatter_base(outputs, inputs, options.reduceOp, rank_, size_); // all before the first is sent
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    works.push_back(_reduce_scatter_base(outputs[i], inputs[i], options));
  }
  return when_all(OpType::COALESCED, std::move(works));
}

} // namespace fog
