#include "process_group_fog.hpp"

#include <numeric>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include "arithmetic.hpp"
#include "mpi/collectives/allreduce.hpp"
#include "mpi/collectives/barrier.hpp"
#include "mpi/collectives/broadcast.hpp"
#include "mpi/collectives/gather_concat.hpp"
#include "mpi/collectives/gather_scatter.hpp"
#include "mpi/collectives/neighbor_allreduce.hpp"
#include "mpi/collectives/reduce.hpp"
#include "mpi/collectives/reduce_scatter.hpp"
#include "mpi/engine.hpp"
#include "mpi/point_to_point.hpp"
#include "names.hpp"
#include "staging.hpp"

namespace fog {

using c10d::OpType;
using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;

namespace {

// PREMUL_SUM's factor, 1 for every other reduction.
double factor_of(const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) {
    return 1.0;
  }
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr, "op: got PREMUL_SUM without a factor");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

Signature reduction_signature(OpKind kind, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  check_reduction(op.op_, tensor.scalar_type());
  auto signature = Signature::of(kind, tensor);
  signature.reduce_op = static_cast<uint8_t>(op.op_);
  return signature;
}

void check_same(const char* op, const char* argument, const at::Tensor& tensor, const at::Tensor& like) {
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == like.scalar_type(), op, ": ", argument, ": got dtype ", dtype_name(tensor.scalar_type()), "; allowed is ",
      dtype_name(like.scalar_type()), " as in the input");
}

void check_numel(const char* op, const char* argument, const at::Tensor& tensor, int64_t numel) {
  TORCH_CHECK_VALUE(
      tensor.numel() == numel, op, ": ", argument, ": got shape ", tensor.sizes(), " (", tensor.numel(), " elements); allowed is one of ",
      numel, " elements");
}

void check_allgather(const std::vector<at::Tensor>& outputs, const at::Tensor& input, int size) {
  check_tensor("allgather", "inputs", input);
  TORCH_CHECK_VALUE(
      static_cast<int>(outputs.size()) == size, "allgather: outputs: got ", outputs.size(), " tensors; allowed is one for each of the ", size,
      " ranks");
  for (const auto& output : outputs) {
    check_output("allgather", "outputs", output);
    check_same("allgather", "outputs", output, input);
    check_numel("allgather", "outputs", output, input.numel());
  }
}

void check_allgather_base(const at::Tensor& output, const at::Tensor& input, int size) {
  check_tensor("allgather_into_tensor", "input", input);
  check_output("allgather_into_tensor", "output", output);
  check_same("allgather_into_tensor", "output", output, input);
  check_numel("allgather_into_tensor", "output", output, input.numel() * size);
}

void check_reduce_scatter_base(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op, int size) {
  check_output("reduce_scatter_tensor", "output", output);
  check_tensor("reduce_scatter_tensor", "input", input);
  check_same("reduce_scatter_tensor", "output", output, input);
  check_numel("reduce_scatter_tensor", "input", input, output.numel() * size);
  check_reduction(op.op_, input.scalar_type());
}

mpi::Block block_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr(), tensor.nbytes()};
}

// Equal parts of a contiguous tensor, one a rank.
std::vector<mpi::Block> parts_of(const at::Tensor& tensor, int count) {
  std::vector<mpi::Block> parts;
  const size_t bytes = tensor.nbytes() / static_cast<size_t>(count);
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  for (int i = 0; i < count; ++i) {
    parts.push_back({data + bytes * static_cast<size_t>(i), bytes});
  }
  return parts;
}

// Parts of a contiguous tensor along dimension 0, one a rank; equal ones if `splits` is empty.
std::vector<mpi::Block> split_rows(
    const char* op, const char* argument, const at::Tensor& tensor, const std::vector<int64_t>& splits, int count) {
  TORCH_CHECK_VALUE(tensor.dim() > 0, op, ": ", argument, ": got a tensor without dimensions; allowed are 1 or more");
  if (splits.empty()) {
    TORCH_CHECK_VALUE(
        tensor.size(0) % count == 0, op, ": ", argument, ": got ", tensor.size(0), " rows; without split sizes allowed are multiples of the ",
        count, " ranks");
    return parts_of(tensor, count);
  }
  TORCH_CHECK_VALUE(
      static_cast<int>(splits.size()) == count, op, ": ", argument, " split sizes: got ", splits.size(), "; allowed is one for each of the ",
      count, " ranks");
  int64_t rows = 0;
  for (const auto size : splits) {
    TORCH_CHECK_VALUE(size >= 0, op, ": ", argument, " split sizes: got ", size, "; allowed are 0 and more");
    rows += size;
  }
  TORCH_CHECK_VALUE(
      rows == tensor.size(0), op, ": ", argument, " split sizes: got a sum of ", rows, "; allowed is the tensor's ", tensor.size(0), " rows");
  const size_t row_bytes = rows > 0 ? tensor.nbytes() / static_cast<size_t>(rows) : 0;
  std::vector<mpi::Block> parts;
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  for (const auto size : splits) {
    parts.push_back({data, row_bytes * static_cast<size_t>(size)});
    data += parts.back().bytes;
  }
  return parts;
}

} // namespace

// What the Work says of an operation.
struct ProcessGroupFog::Call {
  OpType type;
  const char* title; // in the profiler
  std::vector<at::Tensor> inputs; // for the profiler
  std::vector<at::Tensor> outputs; // result()
};

ProcessGroupFog::ProcessGroupFog(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<Options> options)
    : Backend(rank, size), options_(std::move(options)) {
  init();
  const auto& name = options_->group_name.empty() ? std::string("default") : options_->group_name;
  group_ = mpi::Engine::instance().connect(store, rank, size, options_->timeout, name);
}

ProcessGroupFog::~ProcessGroupFog() {
  mpi::Engine::instance().close(group_);
}

void ProcessGroupFog::shutdown() {
  mpi::Engine::instance().close(group_);
}

void ProcessGroupFog::abort() {
  mpi::Engine::instance().abort(group_, c10::str("rank ", rank_, " aborted group '", group_->name, "'"));
}

c10d::ErrorType ProcessGroupFog::getError() {
  return mpi::Engine::instance().failure(group_).type;
}

uint64_t ProcessGroupFog::getSequenceNumberForGroup() {
  return mpi::Engine::instance().sequence(group_);
}

std::vector<int> ProcessGroupFog::hosts() const {
  std::vector<int> hosts;
  for (const auto& member : group_->members) {
    hosts.push_back(member.host);
  }
  return hosts;
}

std::vector<int> ProcessGroupFog::local_ranks() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (group_->members[rank].host == group_->members[rank_].host) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

ProcessGroupFog::CallOptions ProcessGroupFog::call_options(std::chrono::milliseconds timeout) const {
  CallOptions options;
  if (timeout > kNoTimeout) { // kUnsetTimeout is negative
    options.timeout = timeout;
  }
  return options;
}

WorkPtr ProcessGroupFog::submit(
    const std::shared_ptr<mpi::Operation>& operation, const Call& call, const CallOptions& options) {
  auto& engine = mpi::Engine::instance();
  auto work = c10::make_intrusive<WorkFog>(engine, rank_, call.type, call.title, call.inputs, call.outputs);
  for (const auto& tensor : call.inputs) {
    operation->keep(tensor);
  }
  for (const auto& tensor : call.outputs) {
    operation->keep(tensor);
  }
  operation->set_confirm(options.confirm && options_->confirm);
  operation->set_work(work);
  const std::weak_ptr<mpi::Operation> weak = operation;
  work->set_describe([&engine, weak] {
    const auto alive = weak.lock();
    return alive ? engine.describe(alive) : std::string("operation that has ended");
  });
  work->set_abort([&engine, weak] {
    if (const auto alive = weak.lock()) {
      engine.abort(alive->group(), "rank " + std::to_string(alive->group()->rank) + " aborted " + engine.describe(alive));
    }
  });
  engine.submit(group_, operation, options.timeout.value_or(options_->timeout), options.name);
  if (coalescing_) {
    coalesced_.push_back(work);
  }
  return work;
}

WorkPtr ProcessGroupFog::when_all(OpType type, std::vector<WorkPtr> works) {
  std::vector<c10::intrusive_ptr<WorkFog>> parts;
  parts.reserve(works.size());
  for (auto& work : works) {
    parts.push_back(c10::static_intrusive_pointer_cast<WorkFog>(work));
  }
  return WorkFog::when_all(mpi::Engine::instance(), rank_, type, std::move(parts));
}

void ProcessGroupFog::startCoalescing() {
  // Operations start at once on CPU; coalescing only joins their Works.
  coalescing_ = true;
  coalesced_.clear();
}

WorkPtr ProcessGroupFog::endCoalescing() {
  coalescing_ = false;
  return when_all(OpType::COALESCED, std::exchange(coalesced_, {}));
}

void ProcessGroupFog::check_root(const char* op, int64_t root) const {
  TORCH_CHECK_VALUE(root >= 0 && root < size_, op, ": root: got rank ", root, "; allowed are ranks 0 to ", size_ - 1, " of this group of ", size_);
}

void ProcessGroupFog::check_peer(const char* op, int peer, int tag) const {
  TORCH_CHECK_VALUE(peer >= 0 && peer < size_, op, ": peer: got rank ", peer, "; allowed are ranks 0 to ", size_ - 1, " of this group of ", size_);
  TORCH_CHECK_VALUE(peer != rank_, op, ": peer: got this rank itself (", peer, ")");
  TORCH_CHECK_VALUE(tag >= 0, op, ": tag: got ", tag, "; allowed are 0 and more");
}

WorkPtr ProcessGroupFog::broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  auto tensor = only_tensor("broadcast", "tensors", tensors);
  return broadcast_named(tensor, static_cast<int>(options.rootRank), call_options(options.timeout));
}

WorkPtr ProcessGroupFog::broadcast_named(at::Tensor& tensor, int root, const CallOptions& options) {
  check_output("broadcast", "tensor", tensor);
  check_root("broadcast", root);
  Staging staging;
  const auto staged = rank_ == root ? staging.input(tensor) : staging.output(tensor);
  auto signature = Signature::of(OpKind::kBroadcast, tensor);
  signature.root = root;
  const auto block = block_of(staged);
  auto operation = std::make_shared<mpi::Broadcast>(signature, block.data, block.bytes);
  operation->keep(staged);
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::BROADCAST, "fog:broadcast", {tensor}, {tensor}}, options);
}

WorkPtr ProcessGroupFog::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  auto tensor = only_tensor("allreduce", "tensors", tensors);
  return allreduce_named(tensor, options.reduceOp, call_options(options.timeout));
}

WorkPtr ProcessGroupFog::allreduce_named(at::Tensor& tensor, const c10d::ReduceOp& op, const CallOptions& options) {
  check_output("allreduce", "tensor", tensor);
  Staging staging;
  const auto signature = reduction_signature(OpKind::kAllreduce, tensor, op);
  const double factor = factor_of(op);
  const auto staged = staging.in_place(tensor);
  auto operation = std::make_shared<mpi::Allreduce>(signature, block_of(staged).data, staged.numel(), factor);
  operation->keep(staged);
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::ALLREDUCE, "fog:all_reduce", {tensor}, {tensor}}, options);
}

WorkPtr ProcessGroupFog::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) {
  TORCH_CHECK_VALUE(!tensors.empty(), "allreduce_coalesced: tensors: got an empty list");
  int64_t numel = 0;
  for (const auto& tensor : tensors) {
    check_output("allreduce_coalesced", "tensors", tensor);
    check_same("allreduce_coalesced", "tensors", tensor, tensors[0]);
    numel += tensor.numel();
  }
  // One flat tensor, one exchange.
  at::Tensor flat;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    flat = at::empty({numel}, tensors[0].options());
    int64_t begin = 0;
    for (const auto& tensor : tensors) {
      flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()).copy_(tensor);
      begin += tensor.numel();
    }
  }
  const auto signature = reduction_signature(OpKind::kAllreduce, flat, options.reduceOp);
  auto operation = std::make_shared<mpi::Allreduce>(signature, block_of(flat).data, numel, factor_of(options.reduceOp));
  operation->keep(flat);
  operation->set_epilogue([flat, tensors] {
    at::AutoDispatchBelowADInplaceOrView guard;
    int64_t begin = 0;
    for (const auto& tensor : tensors) {
      tensor.copy_(flat.narrow(0, begin, tensor.numel()).view(tensor.sizes()));
      begin += tensor.numel();
    }
  });
  return submit(
      operation, {OpType::ALLREDUCE_COALESCED, "fog:all_reduce_coalesced", tensors, tensors}, call_options(options.timeout));
}

WorkPtr ProcessGroupFog::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) {
  const auto tensor = only_tensor("reduce", "tensors", tensors);
  check_output("reduce", "tensors", tensor);
  check_root("reduce", options.rootRank);
  auto signature = reduction_signature(OpKind::kReduce, tensor, options.reduceOp);
  signature.root = static_cast<int32_t>(options.rootRank);
  Staging staging;
  const auto staged = rank_ == options.rootRank ? staging.in_place(tensor) : staging.input(tensor);
  auto operation =
      std::make_shared<mpi::Reduce>(signature, block_of(staged).data, staged.numel(), factor_of(options.reduceOp));
  operation->keep(staged);
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::REDUCE, "fog:reduce", tensors, tensors}, call_options(options.timeout));
}

WorkPtr ProcessGroupFog::allgather(
    std::vector<std::vector<at::Tensor>>& output_lists, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) {
  const auto input = only_tensor("allgather", "inputs", inputs);
  const auto& outputs = only_list("allgather", "outputs", output_lists);
  check_allgather(outputs, input, size_);
  Staging staging;
  const auto staged_input = staging.input(input);
  std::vector<mpi::Block> blocks;
  std::vector<at::Tensor> staged_outputs;
  for (const auto& output : outputs) {
    staged_outputs.push_back(staging.output(output));
    blocks.push_back(block_of(staged_outputs.back()));
  }
  auto operation = std::make_shared<mpi::Allgather>(
      Signature::of(OpKind::kAllgather, input), block_of(staged_input), std::move(blocks));
  operation->keep(staged_input);
  operation->set_epilogue(staging.copy_back());
  for (const auto& staged : staged_outputs) {
    operation->keep(staged);
  }
  return submit(operation, {OpType::ALLGATHER, "fog:all_gather", inputs, outputs}, call_options(options.timeout));
}

WorkPtr ProcessGroupFog::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  check_allgather_base(output, input, size_);
  Staging staging;
  const auto staged_input = staging.input(input);
  const auto staged_output = staging.output(output);
  auto operation = std::make_shared<mpi::Allgather>(
      Signature::of(OpKind::kAllgather, input), block_of(staged_input), parts_of(staged_output, size_));
  operation->keep(staged_input);
  operation->keep(staged_output);
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::_ALLGATHER_BASE, "fog:_all_gather_base", {input}, {output}}, call_options(options.timeout));
}

WorkPtr ProcessGroupFog::allgather_coalesced(
    std::vector<std::vector<at::Tensor>>& output_lists, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) {
  // output_lists[rank][i] is rank's i-th input.
  TORCH_CHECK_VALUE(!inputs.empty(), "allgather_coalesced: inputs: got an empty list");
  TORCH_CHECK_VALUE(
      static_cast<int>(output_lists.size()) == size_, "allgather_coalesced: outputs: got ", output_lists.size(),
      " lists; allowed is one for each of the ", size_, " ranks");
  for (const auto& list : output_lists) {
    TORCH_CHECK_VALUE(
        list.size() == inputs.size(), "allgather_coalesced: outputs: got a list of ", list.size(), " tensors; allowed is one for each of the ",
        inputs.size(), " inputs");
  }
  std::vector<std::vector<at::Tensor>> outputs(inputs.size()); // by input
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (const auto& list : output_lists) {
      outputs[i].push_back(list[i]);
    }
    check_allgather(outputs[i], inputs[i], size_); // all before the first is sent
  }
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    std::vector<std::vector<at::Tensor>> lists = {outputs[i]};
    std::vector<at::Tensor> input = {inputs[i]};
    works.push_back(allgather(lists, input, options));
  }
  return when_all(OpType::ALLGATHER_COALESCED, std::move(works));
}

WorkPtr ProcessGroupFog::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) {
  TORCH_CHECK_VALUE(
      outputs.size() == inputs.size(), "allgather_into_tensor_coalesced: outputs: got ", outputs.size(),
      " tensors; allowed is one for each of the ", inputs.size(), " inputs");
  for (size_t i = 0; i < inputs.size(); ++i) { // all before the first is sent
    check_allgather_base(outputs[i], inputs[i], size_);
  }
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    works.push_back(_allgather_base(outputs[i], inputs[i], options));
  }
  return when_all(OpType::COALESCED, std::move(works));
}

WorkPtr ProcessGroupFog::gather(
    std::vector<std::vector<at::Tensor>>& output_lists, std::vector<at::Tensor>& inputs, const c10d::GatherOptions& options) {
  const auto input = only_tensor("gather", "inputs", inputs);
  check_tensor("gather", "inputs", input);
  check_root("gather", options.rootRank);
  Staging staging;
  const auto staged_input = staging.input(input);
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> staged_outputs;
  std::vector<mpi::Block> blocks;
  if (rank_ == options.rootRank) {
    outputs = only_list("gather", "outputs", output_lists);
    TORCH_CHECK_VALUE(
        static_cast<int>(outputs.size()) == size_, "gather: outputs: got ", outputs.size(), " tensors on the root; allowed is one for each of the ",
        size_, " ranks");
    for (const auto& output : outputs) {
      check_output("gather", "outputs", output);
      check_same("gather", "outputs", output, input);
      check_numel("gather", "outputs", output, input.numel());
      staged_outputs.push_back(staging.output(output));
      blocks.push_back(block_of(staged_outputs.back()));
    }
  } else {
    TORCH_CHECK_VALUE(output_lists.empty() || (output_lists.size() == 1 && output_lists[0].empty()), "gather: outputs: allowed on the root only, rank ", options.rootRank);
  }
  auto signature = Signature::of(OpKind::kGather, input);
  signature.root = static_cast<int32_t>(options.rootRank);
  auto operation = std::make_shared<mpi::Gather>(signature, block_of(staged_input), std::move(blocks));
  operation->keep(staged_input);
  for (const auto& staged : staged_outputs) {
    operation->keep(staged);
  }
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::GATHER, "fog:gather", inputs, outputs}, call_options(options.timeout));
}

WorkPtr ProcessGroupFog::scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& input_lists, const c10d::ScatterOptions& options) {
  const auto output = only_tensor("scatter", "outputs", outputs);
  check_output("scatter", "outputs", output);
  check_root("scatter", options.rootRank);
  Staging staging;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> staged_inputs;
  std::vector<mpi::Block> blocks;
  if (rank_ == options.rootRank) {
    inputs = only_list("scatter", "inputs", input_lists);
    TORCH_CHECK_VALUE(
        static_cast<int>(inputs.size()) == size_, "scatter: inputs: got ", inputs.size(), " tensors on the root; allowed is one for each of the ",
        size_, " ranks");
    for (const auto& input : inputs) {
      check_tensor("scatter", "inputs", input);
      check_same("scatter", "inputs", input, output);
      check_numel("scatter", "inputs", input, output.numel());
      staged_inputs.push_back(staging.input(input));
      blocks.push_back(block_of(staged_inputs.back()));
    }
  } else {
    TORCH_CHECK_VALUE(input_lists.empty() || (input_lists.size() == 1 && input_lists[0].empty()), "scatter: inputs: allowed on the root only, rank ", options.rootRank);
  }
  const auto staged_output = staging.output(output);
  auto signature = Signature::of(OpKind::kScatter, output);
  signature.root = static_cast<int32_t>(options.rootRank);
  auto operation = std::make_shared<mpi::Scatter>(signature, std::move(blocks), block_of(staged_output));
  operation->keep(staged_output);
  for (const auto& staged : staged_inputs) {
    operation->keep(staged);
  }
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::SCATTER, "fog:scatter", inputs, outputs}, call_options(options.timeout));
}

WorkPtr ProcessGroupFog::reduce_scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& input_lists, const c10d::ReduceScatterOptions& options) {
  const auto output = only_tensor("reduce_scatter", "outputs", outputs);
  const auto& inputs = only_list("reduce_scatter", "inputs", input_lists);
  check_output("reduce_scatter", "outputs", output);
  TORCH_CHECK_VALUE(
      static_cast<int>(inputs.size()) == size_, "reduce_scatter: inputs: got ", inputs.size(), " tensors; allowed is one for each of the ", size_,
      " ranks");
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
  const auto staged_output = staging.output(output);
  auto signature = reduction_signature(OpKind::kReduceScatter, output, options.reduceOp);
  signature.numel = numel; // outputs may differ from rank to rank, the whole does not
  signature.dims = 1;
  signature.shape = {numel};
  auto operation = std::make_shared<mpi::ReduceScatter>(
      signature, std::move(data), std::move(bytes), block_of(staged_output).data, factor_of(options.reduceOp));
  operation->keep(staged_output);
  for (const auto& staged : staged_inputs) {
    operation->keep(staged);
  }
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::REDUCE_SCATTER, "fog:reduce_scatter", inputs, outputs}, call_options(options.timeout));
}

WorkPtr ProcessGroupFog::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  check_reduce_scatter_base(output, input, options.reduceOp, size_);
  Staging staging;
  const auto staged_input = staging.input(input);
  const auto staged_output = staging.output(output);
  std::vector<const void*> data;
  std::vector<size_t> bytes;
  for (const auto& part : parts_of(staged_input, size_)) {
    data.push_back(part.data);
    bytes.push_back(part.bytes);
  }
  auto operation = std::make_shared<mpi::ReduceScatter>(
      reduction_signature(OpKind::kReduceScatter, input, options.reduceOp), std::move(data), std::move(bytes),
      block_of(staged_output).data, factor_of(options.reduceOp));
  operation->keep(staged_input);
  operation->keep(staged_output);
  operation->set_epilogue(staging.copy_back());
  return submit(
      operation, {OpType::_REDUCE_SCATTER_BASE, "fog:_reduce_scatter_base", {input}, {output}}, call_options(options.timeout));
}

WorkPtr ProcessGroupFog::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_VALUE(
      outputs.size() == inputs.size(), "reduce_scatter_tensor_coalesced: outputs: got ", outputs.size(),
      " tensors; allowed is one for each of the ", inputs.size(), " inputs");
  for (size_t i = 0; i < inputs.size(); ++i) { // all before the first is sent
    check_reduce_scatter_base(outputs[i], inputs[i], options.reduceOp, size_);
  }
  std::vector<WorkPtr> works;
  for (size_t i = 0; i < inputs.size(); ++i) {
    works.push_back(_reduce_scatter_base(outputs[i], inputs[i], options));
  }
  return when_all(OpType::COALESCED, std::move(works));
}

WorkPtr ProcessGroupFog::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  check_output("alltoall_base", "output", output);
  check_tensor("alltoall_base", "input", input);
  check_same("alltoall_base", "output", output, input);
  if (output_splits.empty() && input_splits.empty()) {
    check_numel("alltoall_base", "output", output, input.numel());
  }
  Staging staging;
  const auto staged_input = staging.input(input);
  const auto staged_output = staging.output(output);
  auto sends = split_rows("alltoall_base", "input", staged_input, input_splits, size_);
  auto receives = split_rows("alltoall_base", "output", staged_output, output_splits, size_);
  auto operation =
      std::make_shared<mpi::Alltoall>(Signature::of(OpKind::kAlltoall, input), std::move(sends), std::move(receives));
  operation->keep(staged_input);
  operation->keep(staged_output);
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::ALLTOALL_BASE, "fog:all_to_all", {input}, {output}}, call_options(options.timeout));
}

WorkPtr ProcessGroupFog::alltoall(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllToAllOptions& options) {
  for (const auto& [argument, tensors] : {std::make_pair("inputs", &inputs), std::make_pair("outputs", &outputs)}) {
    TORCH_CHECK_VALUE(
        static_cast<int>(tensors->size()) == size_, "alltoall: ", argument, ": got ", tensors->size(), " tensors; allowed is one for each of the ",
        size_, " ranks");
  }
  Staging staging;
  std::vector<at::Tensor> kept;
  std::vector<mpi::Block> sends;
  std::vector<mpi::Block> receives;
  for (int peer = 0; peer < size_; ++peer) {
    check_tensor("alltoall", "inputs", inputs[peer]);
    check_output("alltoall", "outputs", outputs[peer]);
    check_same("alltoall", "inputs", inputs[peer], inputs[0]);
    check_same("alltoall", "outputs", outputs[peer], inputs[0]);
    kept.push_back(staging.input(inputs[peer]));
    sends.push_back(block_of(kept.back()));
    kept.push_back(staging.output(outputs[peer]));
    receives.push_back(block_of(kept.back()));
  }
  check_numel("alltoall", "outputs", outputs[rank_], inputs[rank_].numel());
  auto operation =
      std::make_shared<mpi::Alltoall>(Signature::of(OpKind::kAlltoall, inputs[0]), std::move(sends), std::move(receives));
  for (const auto& tensor : kept) {
    operation->keep(tensor);
  }
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::ALLTOALL, "fog:all_to_all", inputs, outputs}, call_options(options.timeout));
}

WorkPtr ProcessGroupFog::send(std::vector<at::Tensor>& tensors, int destination, int tag) {
  const auto tensor = only_tensor("send", "tensors", tensors);
  check_tensor("send", "tensors", tensor);
  check_peer("send", destination, tag);
  Staging staging;
  const auto staged = staging.input(tensor);
  const auto block = block_of(staged);
  auto operation = std::make_shared<mpi::PointToPointSend>(
      Signature::of(OpKind::kPointToPoint, tensor), destination, tag, block.data, block.bytes);
  operation->keep(staged);
  return submit(operation, {OpType::SEND, "fog:send", tensors, {}}, call_options(c10d::kUnsetTimeout));
}

WorkPtr ProcessGroupFog::recv(std::vector<at::Tensor>& tensors, int source, int tag) {
  const auto tensor = only_tensor("recv", "tensors", tensors);
  check_output("recv", "tensors", tensor);
  check_peer("recv", source, tag);
  Staging staging;
  const auto staged = staging.output(tensor);
  const auto block = block_of(staged);
  auto operation = std::make_shared<mpi::PointToPointReceive>(
      Signature::of(OpKind::kPointToPoint, tensor), source, tag, block.data, block.bytes);
  operation->keep(staged);
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::RECV, "fog:recv", {}, tensors}, call_options(c10d::kUnsetTimeout));
}

WorkPtr ProcessGroupFog::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  const auto tensor = only_tensor("recvAnysource", "tensors", tensors);
  check_output("recvAnysource", "tensors", tensor);
  TORCH_CHECK_VALUE(size_ > 1, "recvAnysource: got a group of this rank alone; nobody can send to it");
  TORCH_CHECK_VALUE(tag >= 0, "recvAnysource: tag: got ", tag, "; allowed are 0 and more");
  Staging staging;
  const auto staged = staging.output(tensor);
  const auto block = block_of(staged);
  auto operation = std::make_shared<mpi::PointToPointReceive>(
      Signature::of(OpKind::kPointToPoint, tensor), -1, tag, block.data, block.bytes);
  operation->keep(staged);
  operation->set_epilogue(staging.copy_back());
  return submit(operation, {OpType::RECVANYSOURCE, "fog:recvAnySource", {}, tensors}, call_options(c10d::kUnsetTimeout));
}

WorkPtr ProcessGroupFog::barrier(const c10d::BarrierOptions& options) {
  return submit(std::make_shared<mpi::Barrier>(), {OpType::BARRIER, "fog:barrier", {}, {}}, call_options(options.timeout));
}

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
