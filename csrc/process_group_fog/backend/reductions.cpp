// The variants of allreduce, reduce and reduce_scatter.
#include "backend/process_group_fog.hpp"

#include <algorithm>

#include <ATen/Functions.h>

#include "backend/arguments.hpp"
#include "core/arithmetic.hpp"
#include "device/neighbors.hpp"
#include "collectives/allreduce.hpp"
#include "collectives/cutovers.hpp"
#include "collectives/reduce.hpp"
#include "collectives/reduce_scatter.hpp"
#include "core/tensor_checks.hpp"
#include "backend/staging.hpp"

namespace fog {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

namespace {

// Checks one operation, or several that are in flight together.
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

// Contiguous memory for partial sums of a tensor: the tensor itself, unless they have another dtype.
at::Tensor sums_of(const at::Tensor& tensor, c10::ScalarType dtype) {
  if (tensor.scalar_type() == dtype) {
    return tensor;
  }
  const auto sums = empty_shared(tensor.sizes(), dtype);
  copy_tensor(sums, tensor);
  return sums;
}

// Copies the result to the tensor, if it is elsewhere, before the epilogue.
void end_with(Operation& operation, const at::Tensor& tensor, const at::Tensor& sums, std::function<void()> epilogue) {
  operation.keep(tensor);
  if (sums.is_same(tensor)) {
    operation.set_epilogue(std::move(epilogue));
    return;
  }
  operation.keep(sums);
  operation.set_epilogue([tensor, sums, epilogue = std::move(epilogue)] {
    copy_tensor(tensor, sums);
    if (epilogue) {
      epilogue();
    }
  });
}

// For a contiguous tensor.
std::shared_ptr<Operation> make_allreduce(
    const Signature& signature,
    const at::Tensor& tensor,
    const c10d::ReduceOp& op,
    const Layout& layout,
    std::function<void()> epilogue) {
  const bool once = cutovers::of_allreduce(tensor.nbytes(), layout).sums_once(layout.hosts);
  const auto sums = sums_of(tensor, cutovers::partial_dtype(tensor.scalar_type(), op.op_, tensor.nbytes(), once));
  auto operation = std::make_shared<Allreduce>(
      Reduction::Terms{signature, sums.scalar_type(), factor_of(op), layout}, part_of(sums).data, tensor.numel());
  end_with(*operation, tensor, sums, std::move(epilogue));
  return operation;
}

} // namespace

WorkPtr ProcessGroupFog::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  const bool is_sparse = !tensors.empty() && tensors[0].defined() && tensors[0].layout() == at::kSparse;
  if (is_sparse) {
    return allreduce_sparse(tensors, options);
  }
  if (const auto delegate = delegate_of("allreduce", tensors)) {
    return delegate->allreduce(tensors, options);
  }
  auto tensor = only_tensor("allreduce", "tensors", tensors);
  return allreduce_named(tensor, options.reduceOp, call_options(options));
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
  return allreduce_among(signature, "fog:all_reduce", tensor, op, group_->layout, options);
}

WorkPtr ProcessGroupFog::allreduce_among(
    Signature signature,
    const char* title,
    at::Tensor& tensor,
    const c10d::ReduceOp& op,
    const Layout& layout,
    const CallOptions& options) {
  Staging staging;
  const auto staged = staging.in_place(tensor);
  const auto operation = make_allreduce(signature, staged, op, layout, staging.copy_back());
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
  const auto operation =
      make_allreduce(signature, flat, options.reduceOp, group_->layout, [flat, tensors] { unflatten(flat, tensors); });
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
  const bool is_root = rank_ == options.rootRank;
  const auto staged = is_root ? staging.in_place(tensor) : staging.input(tensor);
  const Call call{OpType::REDUCE, "fog:reduce", tensors, tensors};
  const auto& layout = group_->layout;
  const bool once = cutovers::of_reduce(staged.nbytes(), layout).sums_once(layout.hosts);
  const auto sums = sums_of(staged, cutovers::partial_dtype(staged.scalar_type(), options.reduceOp.op_, staged.nbytes(), once));
  const auto operation = std::make_shared<Reduce>(
      Reduction::Terms{signature, sums.scalar_type(), factor_of(options.reduceOp), layout}, part_of(sums).data, staged.numel());
  end_with(*operation, is_root ? staged : sums, sums, staging.copy_back());
  return submit(operation, call, call_options(options));
}

WorkPtr ProcessGroupFog::reduce_scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& input_lists, const c10d::ReduceScatterOptions& options) {
  if (const auto delegate = delegate_of("reduce_scatter", outputs, input_lists)) {
    return delegate->reduce_scatter(outputs, input_lists, options);
  }
  const auto output = only_tensor("reduce_scatter", "outputs", outputs);
  const auto& inputs = only_list("reduce_scatter", "inputs", input_lists);
  check_output("reduce_scatter", "outputs", output);
  check_count("reduce_scatter", "inputs", inputs, size_);
  Staging staging;
  std::vector<Part> parts;
  int64_t numel = 0;
  uint64_t division = kEmptyHash;
  for (const auto& input : inputs) {
    check_tensor("reduce_scatter", "inputs", input);
    check_same("reduce_scatter", "inputs", input, output);
    parts.push_back(part_of(staging.input(input)));
    numel += input.numel();
    division = hash_more(division, input.numel());
  }
  check_numel("reduce_scatter", "outputs", output, inputs[rank_].numel());
  check_disjoint("reduce_scatter", {"outputs", output}, {"inputs", inputs}, [&](size_t, size_t place) {
    return static_cast<int>(place) == rank_ && same_memory(inputs[place], output);
  });
  const auto staged_output = staging.output(output);
  auto signature = reduction_signature(OpKind::kReduceScatter, output, options.reduceOp);
  signature.numel = numel; // outputs may differ between ranks, the total does not
  signature.dims = 1;
  signature.shape = {numel};
  // sums of several parts travel together, so their sizes do not reveal a different division
  signature.layout = mark(division);
  return reduce_scatter_parts(
      signature, parts, staged_output, options.reduceOp, staging, {OpType::REDUCE_SCATTER, "fog:reduce_scatter", inputs, outputs},
      call_options(options));
}

WorkPtr ProcessGroupFog::reduce_scatter_parts(
    const Signature& signature,
    const std::vector<Part>& inputs,
    const at::Tensor& output,
    const c10d::ReduceOp& op,
    const Staging& staging,
    const Call& call,
    const CallOptions& options) {
  const auto& layout = group_->layout;
  std::vector<size_t> numels;
  size_t bytes = 0;
  for (const auto& input : inputs) {
    numels.push_back(input.bytes / output.element_size());
    bytes += input.bytes;
  }
  const auto order = ReduceScatter::order(layout, bytes);
  const auto dtype = cutovers::partial_dtype(output.scalar_type(), op.op_, bytes, order.empty());
  const Reduction::Terms terms{signature, dtype, factor_of(op), layout};
  if (order.empty()) {
    std::vector<const void*> data;
    for (const auto& input : inputs) {
      data.push_back(input.data);
    }
    const auto operation = std::make_shared<ReduceScatter>(terms, std::move(data), numels, part_of(output).data);
    staging.attach(*operation);
    return submit(operation, call, options);
  }
  std::vector<at::Tensor> ordered;
  for (const int rank : order) {
    const auto& input = inputs[static_cast<size_t>(rank)];
    ordered.push_back(at::from_blob(input.data, {static_cast<int64_t>(numels[static_cast<size_t>(rank)])}, output.options()));
  }
  const auto sums = empty_shared({static_cast<int64_t>(bytes / output.element_size())}, dtype);
  const auto places = views_of(sums, ordered);
  for (size_t i = 0; i < places.size(); ++i) {
    copy_tensor(places[i], ordered[i]);
  }
  const auto operation = std::make_shared<ReduceScatter>(terms, part_of(sums).data, order, numels, bytes);
  const auto own = static_cast<size_t>(std::find(order.begin(), order.end(), rank_) - order.begin());
  end_with(*operation, output, places[own].view(output.sizes()), staging.copy_back());
  return submit(operation, call, options);
}

WorkPtr ProcessGroupFog::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  if (const auto delegate = delegate_of("reduce_scatter_tensor", output, input)) {
    return delegate->_reduce_scatter_base(output, input, options);
  }
  check_reduce_scatter_base(output, input, options.reduceOp, rank_, size_);
  Staging staging;
  const auto parts = parts_of(staging.input(input), size_);
  const auto staged_output = staging.output(output);
  const auto signature = reduction_signature(OpKind::kReduceScatter, input, options.reduceOp);
  const Call call{OpType::_REDUCE_SCATTER_BASE, "fog:_reduce_scatter_base", at::TensorList(input), {output}};
  return reduce_scatter_parts(signature, parts, staged_output, options.reduceOp, staging, call, call_options(options));
}

WorkPtr ProcessGroupFog::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& options) {
  if (const auto delegate = delegate_of("reduce_scatter_tensor_coalesced", outputs, inputs)) {
    return delegate->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  TORCH_CHECK_VALUE(
      outputs.size() == inputs.size(), "reduce_scatter_tensor_coalesced: outputs: got ", outputs.size(),
      " tensors; allowed is one for each of the ", inputs.size(), " inputs");
  check_reduce_scatter_base(outputs, inputs, options.reduceOp, rank_, size_); // check all before sending the first
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    works.push_back(_reduce_scatter_base(outputs[i], inputs[i], options));
  }
  return when_all(OpType::COALESCED, std::move(works));
}

} // namespace fog
