// Operations that move tensors without arithmetic: broadcast, gathers, scatter, all-to-all.
#include "backend/process_group_fog.hpp"

#include <ATen/Functions.h>

#include "backend/arguments.hpp"
#include "device/neighbors.hpp"
#include "collectives/allgather.hpp"
#include "collectives/broadcast.hpp"
#include "collectives/alltoall.hpp"
#include "collectives/gather.hpp"
#include "collectives/scatter.hpp"
#include "core/tensor_checks.hpp"
#include "backend/staging.hpp"

namespace fog {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

namespace {

// Checks the tensors that take, or give, one rank's part each, against this rank's own one.
void check_parts(
    const char* op, const char* argument, const std::vector<at::Tensor>& parts, bool are_outputs, const at::Tensor& own, int rank) {
  for (const auto& part : parts) {
    are_outputs ? check_output(op, argument, part) : check_tensor(op, argument, part);
    check_same(op, argument, part, own);
    check_numel(op, argument, part, own.numel());
  }
  const auto in_place = [&](size_t place) { return static_cast<int>(place) == rank && same_memory(parts[place], own); };
  if (are_outputs) {
    check_disjoint(op, {"outputs", parts}, {"inputs", own}, [&](size_t place, size_t) { return in_place(place); });
  } else {
    check_disjoint(op, {"outputs", own}, {"inputs", parts}, [&](size_t, size_t place) { return in_place(place); });
  }
}

// Contiguous memory for the tensors that give, or take, one rank's part each.
std::vector<Part> staged_parts(Staging& staging, const std::vector<at::Tensor>& tensors, bool are_outputs) {
  std::vector<Part> parts;
  for (const auto& tensor : tensors) {
    parts.push_back(part_of(are_outputs ? staging.output(tensor) : staging.input(tensor)));
  }
  return parts;
}

// The root's list, of a tensor for each rank; empty on other ranks.
std::vector<at::Tensor> list_of_root(
    const char* op, const char* argument, const std::vector<std::vector<at::Tensor>>& lists, int64_t root, int rank, int size) {
  if (rank == root) {
    const auto& list = only_list(op, argument, lists);
    check_count(op, argument, list, size, " on the root");
    return list;
  }
  TORCH_CHECK_VALUE(
      lists.empty() || (lists.size() == 1 && lists[0].empty()), op, ": ", argument, ": allowed on the root only, rank ", root);
  return {};
}

// Checks one operation, or several that are in flight together.
void check_allgather_base(c10::ArrayRef<at::Tensor> outputs, c10::ArrayRef<at::Tensor> inputs, int rank, int size) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor("allgather_into_tensor", "input", inputs[i]);
    check_output("allgather_into_tensor", "output", outputs[i]);
    check_same("allgather_into_tensor", "output", outputs[i], inputs[i]);
    check_numel("allgather_into_tensor", "output", outputs[i], inputs[i].numel() * size);
  }
  check_disjoint("allgather_into_tensor", {"output", outputs}, {"input", inputs}, [&](size_t output, size_t input) {
    return output == input && is_part(inputs[input], outputs[output], rank, size);
  });
}

// Divides a contiguous tensor along dimension 0 into one part per rank; equal parts if `splits` is empty.
std::vector<Part> split_rows(
    const char* op, const char* argument, const at::Tensor& tensor, const std::vector<int64_t>& splits, int count) {
  TORCH_CHECK_VALUE(tensor.dim() > 0, op, ": ", argument, ": got a tensor without dimensions; allowed are 1 or more");
  if (splits.empty()) {
    TORCH_CHECK_VALUE(
        tensor.size(0) % count == 0, op, ": ", argument, ": got ", tensor.size(0),
        " rows; without split sizes allowed are multiples of the ", count, " ranks");
    return parts_of(tensor, count);
  }
  TORCH_CHECK_VALUE(
      static_cast<int>(splits.size()) == count, op, ": ", argument, " split sizes: got ", splits.size(),
      "; allowed is one for each of the ", count, " ranks");
  int64_t rows = 0;
  for (const auto size : splits) {
    TORCH_CHECK_VALUE(size >= 0, op, ": ", argument, " split sizes: got ", size, "; allowed are 0 and more");
    rows += size;
  }
  TORCH_CHECK_VALUE(
      rows == tensor.size(0), op, ": ", argument, " split sizes: got a sum of ", rows, "; allowed is the tensor's ", tensor.size(0),
      " rows");
  const size_t row_bytes = rows > 0 ? tensor.nbytes() / static_cast<size_t>(rows) : 0;
  std::vector<Part> parts;
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  for (const auto size : splits) {
    parts.push_back({data, row_bytes * static_cast<size_t>(size)});
    data += parts.back().bytes;
  }
  return parts;
}

} // namespace

WorkPtr ProcessGroupFog::broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  if (const auto delegate = delegate_of("broadcast", tensors)) {
    return delegate->broadcast(tensors, options);
  }
  auto tensor = only_tensor("broadcast", "tensors", tensors);
  return broadcast_named(tensor, static_cast<int>(options.rootRank), call_options(options));
}

WorkPtr ProcessGroupFog::broadcast_named(at::Tensor& tensor, int root, const CallOptions& options) {
  check_output("broadcast", "tensor", tensor, where_is(tensor));
  check_root("broadcast", root);
  auto signature = Signature::of(OpKind::kBroadcast, tensor);
  signature.root = root;
  if (const auto device = neighbors_of("broadcast", tensor)) {
    compare_everywhere(signature, options);
    return device->collective(
        "broadcast", "fog:broadcast", OpType::BROADCAST, tensor, [&](c10d::Backend& delegate, std::vector<at::Tensor>& tensors) {
          c10d::BroadcastOptions given;
          given.rootRank = root;
          given.timeout = options.timeout.value_or(c10d::kUnsetTimeout);
          return delegate.broadcast(tensors, given);
        });
  }
  Staging staging;
  const auto staged = rank_ == root ? staging.input(tensor) : staging.output(tensor);
  const auto block = part_of(staged);
  auto operation = std::make_shared<Broadcast>(signature, block.data, block.bytes);
  staging.attach(*operation);
  return submit(operation, {OpType::BROADCAST, "fog:broadcast", {tensor}, {tensor}}, options);
}

WorkPtr ProcessGroupFog::allgather(
    std::vector<std::vector<at::Tensor>>& output_lists, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) {
  if (const auto delegate = delegate_of("allgather", output_lists, inputs)) {
    return delegate->allgather(output_lists, inputs, options);
  }
  const auto& input = only_tensor("allgather", "inputs", inputs);
  const auto& outputs = only_list("allgather", "outputs", output_lists);
  check_tensor("allgather", "inputs", input);
  check_count("allgather", "outputs", outputs, size_);
  check_parts("allgather", "outputs", outputs, true, input, rank_);
  Staging staging;
  auto blocks = staged_parts(staging, outputs, true);
  auto operation =
      std::make_shared<Allgather>(Signature::of(OpKind::kAllgather, input), part_of(staging.input(input)), std::move(blocks));
  staging.attach(*operation);
  return submit(operation, {OpType::ALLGATHER, "fog:all_gather", inputs, outputs}, call_options(options));
}

WorkPtr ProcessGroupFog::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  if (const auto delegate = delegate_of("allgather_into_tensor", output, input)) {
    return delegate->_allgather_base(output, input, options);
  }
  check_allgather_base(output, input, rank_, size_);
  Staging staging;
  auto operation = std::make_shared<Allgather>(
      Signature::of(OpKind::kAllgather, input), part_of(staging.input(input)), parts_of(staging.output(output), size_));
  staging.attach(*operation);
  return submit(operation, {OpType::_ALLGATHER_BASE, "fog:_all_gather_base", {input}, {output}}, call_options(options));
}

WorkPtr ProcessGroupFog::allgather_coalesced(
    std::vector<std::vector<at::Tensor>>& output_lists, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) {
  if (const auto delegate = delegate_of("allgather_coalesced", output_lists, inputs)) {
    return delegate->allgather_coalesced(output_lists, inputs, options);
  }
  // output_lists[rank][i] is rank's i-th input.
  TORCH_CHECK_VALUE(!inputs.empty(), "allgather_coalesced: inputs: got an empty list");
  TORCH_CHECK_VALUE(
      static_cast<int>(output_lists.size()) == size_, "allgather_coalesced: outputs: got ", output_lists.size(),
      " lists; allowed is one for each of the ", size_, " ranks");
  std::vector<at::Tensor> outputs;
  for (const auto& list : output_lists) {
    TORCH_CHECK_VALUE(
        list.size() == inputs.size(), "allgather_coalesced: outputs: got a list of ", list.size(),
        " tensors; allowed is one for each of the ", inputs.size(), " inputs");
    outputs.insert(outputs.end(), list.begin(), list.end());
  }
  constexpr const char* op = "allgather_coalesced";
  int64_t numel = 0;
  for (const auto& input : inputs) {
    check_tensor(op, "inputs", input);
    check_same(op, "inputs", input, inputs[0]);
    numel += input.numel();
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    check_output(op, "outputs", outputs[i]);
    check_same(op, "outputs", outputs[i], inputs[0]);
    check_numel(op, "outputs", outputs[i], inputs[i % inputs.size()].numel());
  }
  // The outputs have the inputs of this rank after those of lower ranks.
  check_disjoint(op, {"outputs", outputs}, {"inputs", inputs}, [&](size_t output, size_t input) {
    return output == inputs.size() * rank_ + input && same_memory(outputs[output], inputs[input]);
  });
  const auto sent = flatten(inputs);
  const auto received = at::empty({size_ * numel}, sent.options().requires_grad(false));
  auto operation = std::make_shared<Allgather>(Signature::of(OpKind::kAllgather, sent), part_of(sent), parts_of(received, size_));
  operation->keep(sent);
  operation->keep(received);
  operation->set_epilogue([received, outputs] { unflatten(received, outputs); });
  return submit(operation, {OpType::ALLGATHER_COALESCED, "fog:all_gather", inputs, outputs}, call_options(options));
}

WorkPtr ProcessGroupFog::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) {
  if (const auto delegate = delegate_of("allgather_into_tensor_coalesced", outputs, inputs)) {
    return delegate->allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  TORCH_CHECK_VALUE(
      outputs.size() == inputs.size(), "allgather_into_tensor_coalesced: outputs: got ", outputs.size(),
      " tensors; allowed is one for each of the ", inputs.size(), " inputs");
  check_allgather_base(outputs, inputs, rank_, size_); // check all before sending the first
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    works.push_back(_allgather_base(outputs[i], inputs[i], options));
  }
  return when_all(OpType::COALESCED, std::move(works));
}

WorkPtr ProcessGroupFog::gather(
    std::vector<std::vector<at::Tensor>>& output_lists, std::vector<at::Tensor>& inputs, const c10d::GatherOptions& options) {
  if (const auto delegate = delegate_of("gather", output_lists, inputs)) {
    return delegate->gather(output_lists, inputs, options);
  }
  const auto input = only_tensor("gather", "inputs", inputs);
  check_tensor("gather", "inputs", input);
  check_root("gather", options.rootRank);
  const auto outputs = list_of_root("gather", "outputs", output_lists, options.rootRank, rank_, size_);
  check_parts("gather", "outputs", outputs, true, input, rank_);
  Staging staging;
  auto blocks = staged_parts(staging, outputs, true);
  auto signature = Signature::of(OpKind::kGather, input);
  signature.root = static_cast<int32_t>(options.rootRank);
  auto operation = std::make_shared<Gather>(signature, part_of(staging.input(input)), std::move(blocks));
  staging.attach(*operation);
  return submit(operation, {OpType::GATHER, "fog:gather", inputs, outputs}, call_options(options));
}

#ifdef C10D_BACKEND_HAS_WINDOW
WorkPtr ProcessGroupFog::gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& options) {
  if (const auto delegate = delegate_of("gather_single", output, input)) {
    return delegate->gather_single(output, input, options);
  }
  std::vector<std::vector<at::Tensor>> outputs;
  if (rank_ == options.rootRank) {
    check_output("gather_single", "output", output);
    check_tensor("gather_single", "input", input);
    check_same("gather_single", "output", output, input);
    check_numel("gather_single", "output", output, input.numel() * size_);
    TORCH_CHECK_VALUE(output.is_contiguous(), "gather_single: output: got a tensor that is not contiguous");
    outputs.push_back(output.detach().view({size_, -1}).unbind());
  }
  std::vector<at::Tensor> inputs = {input};
  return gather(outputs, inputs, options);
}
#endif

WorkPtr ProcessGroupFog::scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& input_lists, const c10d::ScatterOptions& options) {
  if (const auto delegate = delegate_of("scatter", outputs, input_lists)) {
    return delegate->scatter(outputs, input_lists, options);
  }
  const auto output = only_tensor("scatter", "outputs", outputs);
  check_output("scatter", "outputs", output);
  check_root("scatter", options.rootRank);
  const auto inputs = list_of_root("scatter", "inputs", input_lists, options.rootRank, rank_, size_);
  check_parts("scatter", "inputs", inputs, false, output, rank_);
  Staging staging;
  auto blocks = staged_parts(staging, inputs, false);
  auto signature = Signature::of(OpKind::kScatter, output);
  signature.root = static_cast<int32_t>(options.rootRank);
  auto operation = std::make_shared<Scatter>(signature, std::move(blocks), part_of(staging.output(output)));
  staging.attach(*operation);
  return submit(operation, {OpType::SCATTER, "fog:scatter", inputs, outputs}, call_options(options));
}

WorkPtr ProcessGroupFog::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  if (const auto delegate = delegate_of("alltoall_base", output, input)) {
    return delegate->alltoall_base(output, input, output_splits, input_splits, options);
  }
  check_output("alltoall_base", "output", output);
  check_tensor("alltoall_base", "input", input);
  check_same("alltoall_base", "output", output, input);
  if (output_splits.empty() && input_splits.empty()) {
    check_numel("alltoall_base", "output", output, input.numel());
  }
  check_disjoint("alltoall_base", {"output", output}, {"input", input});
  Staging staging;
  const auto staged_input = staging.input(input);
  const auto staged_output = staging.output(output);
  auto sends = split_rows("alltoall_base", "input", staged_input, input_splits, size_);
  auto receives = split_rows("alltoall_base", "output", staged_output, output_splits, size_);
  auto operation = std::make_shared<Alltoall>(Signature::of(OpKind::kAlltoall, input), std::move(sends), std::move(receives));
  staging.attach(*operation);
  return submit(operation, {OpType::ALLTOALL_BASE, "fog:all_to_all", {input}, {output}}, call_options(options));
}

WorkPtr ProcessGroupFog::alltoall(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllToAllOptions& options) {
  if (const auto delegate = delegate_of("alltoall", outputs, inputs)) {
    return delegate->alltoall(outputs, inputs, options);
  }
  check_count("alltoall", "inputs", inputs, size_);
  check_count("alltoall", "outputs", outputs, size_);
  for (int peer = 0; peer < size_; ++peer) {
    check_tensor("alltoall", "inputs", inputs[peer]);
    check_output("alltoall", "outputs", outputs[peer]);
    check_same("alltoall", "inputs", inputs[peer], inputs[0]);
    check_same("alltoall", "outputs", outputs[peer], inputs[0]);
  }
  check_numel("alltoall", "outputs", outputs[rank_], inputs[rank_].numel());
  check_disjoint("alltoall", {"outputs", outputs}, {"inputs", inputs}, [&](size_t output, size_t input) {
    return output == input && static_cast<int>(input) == rank_ && same_memory(outputs[output], inputs[input]);
  });
  Staging staging;
  auto operation = std::make_shared<Alltoall>(
      Signature::of(OpKind::kAlltoall, inputs[0]), staged_parts(staging, inputs, false), staged_parts(staging, outputs, true));
  staging.attach(*operation);
  return submit(operation, {OpType::ALLTOALL, "fog:all_to_all", inputs, outputs}, call_options(options));
}

} // namespace fog
