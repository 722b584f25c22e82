// fog's own operations: exchanges with a rank's neighbors, and the gather of tensors with different sizes.
#include "backend/process_group_fog.hpp"

#include <algorithm>
#include <numeric>
#include <string>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "backend/arguments.hpp"
#include "core/arithmetic.hpp"
#include "device/neighbors.hpp"
#include "core/machines.hpp"
#include "collectives/barrier.hpp"
#include "collectives/compressed_neighbor_allreduce.hpp"
#include "collectives/gather_concat.hpp"
#include "collectives/hierarchical_neighbor_allreduce.hpp"
#include "collectives/neighbor_allreduce.hpp"
#include "core/names.hpp"
#include "core/tensor_checks.hpp"
#include "core/tensor_lists.hpp"
#include "transport/shared_memory/shared_tensors.hpp"
#include "backend/staging.hpp"

namespace fog {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

namespace {

using Tensors = std::vector<at::Tensor>;

constexpr size_t kSharedResult = size_t(1) << 20; // bytes

// Throws ValueError unless `plan` is for `rank` of `size`; `what` is "rank" or "rank's machine".
void check_plan(const char* op, const NeighborPlan& plan, const char* what, int rank, int size) {
  TORCH_CHECK_VALUE(
      plan.rank() == rank && plan.size() == size, op, ": plan: got a plan for rank ", plan.rank(), " of ", plan.size(),
      "; allowed is one for this ", what, ", ", rank, " of ", size);
}

uint64_t hash_of(const NeighborPlan& plan) {
  uint64_t hash = hash_more(kEmptyHash, plan.mean() ? 1 : 0);
  auto more = [&hash](double weight) { hash = hash_more(hash, &weight, sizeof(weight)); };
  more(plan.self_weight());
  for (const auto* peers : {&plan.sources(), &plan.destinations()}) {
    hash = hash_more(hash, static_cast<int64_t>(peers->size()));
    for (const auto& peer : *peers) {
      hash = hash_more(hash, peer.rank);
      more(peer.weight);
    }
  }
  return hash;
}

// "tensor", or "tensor[2]" for a list.
std::string numbered(const char* argument, size_t index, const Tensors& tensors) {
  return tensors.size() == 1 ? argument : argument + ("[" + std::to_string(index) + "]");
}

// Each result must have its own memory, with the shape and dtype of its tensor.
void check_results(const char* op, const char* argument, const Tensors& tensors, const Tensors& outputs) {
  TORCH_CHECK_VALUE(
      outputs.size() == tensors.size(), op, ": ", argument, ": got ", outputs.size(), " tensors; allowed is one for each of the ",
      tensors.size(), " tensors");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto name = numbered(argument, i, tensors);
    check_output(op, name.c_str(), outputs[i], tensors[i].device());
    check_same(op, name.c_str(), outputs[i], tensors[i]);
    TORCH_CHECK_VALUE(
        outputs[i].sizes() == tensors[i].sizes(), op, ": ", name, ": got shape ", outputs[i].sizes(),
        "; allowed is that of the tensor, ", tensors[i].sizes());
  }
}

// An output may overlap no tensor except its own: other tensors may be read after the output is written.
void check_outputs(const char* op, const Tensors& tensors, const Tensors& outputs) {
  check_results(op, "output", tensors, outputs);
  check_disjoint(op, {"output", outputs}, {"tensor", tensors}, [&](size_t output, size_t tensor) {
    return output == tensor && same_memory(outputs[output], tensors[tensor]);
  });
}

// Checks tensors that must all be on the first tensor's device.
void check_mix(const char* op, const Tensors& tensors, const std::optional<Tensors>& outputs) {
  TORCH_CHECK_VALUE(!tensors.empty(), op, ": tensor: got an empty list");
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_tensor(op, numbered("tensor", i, tensors).c_str(), tensors[i], where_is(tensors[0]));
    check_weighted_sum(tensors[i].scalar_type());
  }
  if (outputs) {
    check_outputs(op, tensors, *outputs);
  }
}

void check_compression(
    const char* op, const ProcessGroupFog::Compression& compression, const Tensors& tensors, const std::optional<Tensors>& outputs) {
  TORCH_CHECK_VALUE(compression.codec || !compression.decoded, op, ": decoded: got tensors without compression");
  TORCH_CHECK_VALUE(compression.codec || !compression.conserve, op, ": conserve: got True without compression");
  TORCH_CHECK_VALUE(!compression.conserve || !compression.decoded, op, ": conserve: got True with decoded");
  if (!compression.codec) {
    return;
  }
  for (const auto& tensor : tensors) {
    compression.codec->check(op, tensor.scalar_type());
  }
  if (compression.decoded) {
    check_results(op, "decoded", tensors, *compression.decoded);
    check_disjoint(op, {"decoded", *compression.decoded}, {"tensor", tensors});
    if (outputs) {
      check_disjoint(op, {"decoded", *compression.decoded}, {"output", *outputs});
    }
  }
}

// The indices of the tensors of each dtype, in the order of the dtypes' first appearance.
std::vector<std::vector<size_t>> by_dtype(const Tensors& tensors) {
  std::vector<std::vector<size_t>> parts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto part = std::find_if(parts.begin(), parts.end(), [&](const std::vector<size_t>& places) {
      return tensors[places[0]].scalar_type() == tensors[i].scalar_type();
    });
    (part == parts.end() ? parts.emplace_back() : *part).push_back(i);
  }
  return parts;
}

// The signature for the exchange of a list's tensors of one dtype. A list with one tensor has the signature of that
// tensor. Longer lists agree if all their tensors have the same shapes and dtypes, so the first exchange already
// detects a disagreement.
Signature list_signature(OpKind kind, const Tensors& part, const Tensors& tensors) {
  if (tensors.size() == 1) {
    return Signature::of(kind, tensors[0]);
  }
  Signature signature;
  signature.kind = kind;
  signature.dtype = static_cast<int8_t>(part[0].scalar_type());
  signature.dims = 1;
  signature.numel = total_numel(part);
  signature.shape[0] = signature.numel;
  signature.tensors = static_cast<uint32_t>(tensors.size());
  uint64_t hash = kEmptyHash;
  for (const auto& tensor : tensors) {
    hash = hash_more(hash, static_cast<int64_t>(tensor.scalar_type()));
    hash = hash_more(hash, tensor.dim());
    for (const int64_t size : tensor.sizes()) {
      hash = hash_more(hash, size);
    }
  }
  signature.layout = mark(hash);
  return signature;
}

// New tensors on their devices; those of one dtype are contiguous.
Tensors empty_like(const Tensors& tensors, const std::vector<std::vector<size_t>>& parts) {
  Tensors results(tensors.size());
  for (const auto& places : parts) {
    const auto part = pick(tensors, places);
    const auto views = views_of(at::empty({total_numel(part)}, part[0].options().requires_grad(false)), part);
    for (size_t i = 0; i < places.size(); ++i) {
      results[places[i]] = views[i];
    }
  }
  return results;
}

std::vector<int> ranks_of(const std::vector<WeightedPeer>& peers) {
  std::vector<int> ranks;
  for (const auto& peer : peers) {
    ranks.push_back(peer.rank);
  }
  return ranks;
}

} // namespace

std::shared_ptr<device::Neighbors> ProcessGroupFog::neighbors_serving(const char* op, c10::ArrayRef<const at::Tensor*> tensors) {
  const auto device = tensors[0]->device();
  TORCH_CHECK_VALUE(
      !coalescing_ || device.is_cpu(), op, ": cannot be coalesced with other operations for tensors on ", device,
      "; allowed are those of torch.distributed");
  const auto delegate = device_backends_->serving(op, tensors);
  if (!delegate) {
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(neighbors_mutex_);
  for (const auto& [known, neighbors] : neighbors_) {
    if (known == device) {
      return neighbors;
    }
  }
  auto neighbors = std::make_shared<device::Neighbors>(delegate.backend, delegate.gate, rank_, group_->name, device);
  neighbors_.emplace_back(device, neighbors);
  return neighbors;
}

std::vector<Signature> ProcessGroupFog::compare(
    const Signature& signature, std::vector<int> sources, std::vector<int> destinations, const CallOptions& options) {
  const auto nothing = at::empty({signature.shape[0], 0}, at::TensorOptions(at::kCPU).dtype(at::kByte));
  const auto operation = std::make_shared<GatherConcat>(signature, nothing, std::move(sources), std::move(destinations));
  auto call = options;
  call.confirm = true;
  call.waits = true;
  submit(operation, {OpType::UNKNOWN, nullptr, {}, {}}, call)->wait();
  return operation->signatures();
}

void ProcessGroupFog::compare_everywhere(const Signature& signature, const CallOptions& options) {
  if (confirms(options)) {
    auto call = options;
    call.waits = true;
    submit(std::make_shared<Barrier>(signature), {OpType::UNKNOWN, nullptr, {}, {}}, call)->wait();
  }
}

WorkPtr ProcessGroupFog::agree(at::Tensor& sums, const CallOptions& options) {
  check_output(name_of(OpKind::kAgree), "sums", sums);
  TORCH_CHECK_VALUE(sums.scalar_type() == at::kUInt64, "agree: sums: got dtype ", sums.scalar_type(), "; allowed is uint64");
  const auto signature = reduction_signature(OpKind::kAgree, sums, c10d::ReduceOp::SUM);
  return allreduce_among(signature, "fog:agree", sums, c10d::ReduceOp::SUM, group_->layout, options);
}

WorkPtr ProcessGroupFog::through_host(
    const char* op,
    const Tensors& tensors,
    const std::optional<Tensors>& outputs,
    const Compression& compression,
    c10::function_ref<WorkPtr(const Tensors& here, const Compression& given)> exchange) {
  const auto results = outputs ? *outputs : empty_like(tensors, by_dtype(tensors));
  Tensors here;
  auto given = compression;
  {
    const at::AutoDispatchBelowADInplaceOrView no_grad;
    for (const auto& tensor : tensors) {
      here.push_back(tensor.cpu()); // waits for the device
    }
    for (size_t i = 0; given.decoded && i < tensors.size(); ++i) {
      (*given.decoded)[i] = at::empty_like(here[i]);
    }
  }
  const auto finish = [results, there = compression.decoded, decoded = given.decoded](const Tensors& found) {
    for (size_t i = 0; i < results.size(); ++i) {
      copy_tensor(results[i], found[i]);
      if (decoded) {
        copy_tensor((*there)[i], (*decoded)[i]);
      }
    }
  };
  return then([&] { return exchange(here, given); }, {OpType::UNKNOWN, nullptr, tensors, results}, op, finish);
}

WorkPtr ProcessGroupFog::mix_part(
    Signature signature,
    const char* title,
    const Tensors& inputs,
    Tensors& outputs,
    const CallOptions& options,
    const Compression& compression,
    MakeMix make) {
  Staging staging;
  const auto in = staging.input(inputs);
  at::Tensor out;
  if (!outputs.empty()) {
    out = staging.output(outputs);
  } else {
    const auto sizes = inputs.size() == 1 ? inputs[0].sizes() : in.sizes();
    // If the inputs are in shared memory, so are the results, because they may be the next inputs. Results of a size
    // that travels with the header do not benefit from that. Large results always use shared memory: new pages of
    // ordinary memory would cost more than the exchange.
    const bool share = in.nbytes() >= kSharedResult ||
        (in.nbytes() > Transport::kLocalInlineBytes && std::all_of(inputs.begin(), inputs.end(), is_shared));
    out = share ? empty_shared(sizes, in.scalar_type()) : at::empty(sizes, in.options().requires_grad(false));
    outputs = inputs.size() == 1 ? Tensors{out} : views_of(out, inputs);
  }
  Encoding encoding;
  if (compression.codec) {
    signature.set_codec(compression.codec->text());
    encoding.codec = compression.codec;
    encoding.conserve = compression.conserve;
    if (compression.decoded) {
      encoding.decoded = staging.output(*compression.decoded).mutable_data_ptr();
    }
  }
  const auto operation = make(signature, encoding, in.const_data_ptr(), out.mutable_data_ptr(), static_cast<size_t>(in.numel()));
  operation->keep(out);
  staging.attach(*operation);
  return submit(operation, {OpType::UNKNOWN, title, inputs, outputs}, options);
}

WorkPtr ProcessGroupFog::mix(
    OpKind kind,
    const char* title,
    const Tensors& tensors,
    const std::optional<Tensors>& outputs,
    const CallOptions& options,
    const Compression& compression,
    MakeMix make) {
  if (tensors.size() == 1) {
    auto results = outputs.value_or(Tensors());
    return mix_part(Signature::of(kind, tensors[0]), title, tensors, results, options, compression, make);
  }
  Tensors results(tensors.size());
  std::vector<WorkPtr> works;
  for (const auto& places : by_dtype(tensors)) {
    const auto inputs = pick(tensors, places);
    auto part = outputs ? pick(*outputs, places) : Tensors();
    // The first part uses the name itself, so that ranks whose lists have different dtypes meet there.
    auto named = options;
    if (!works.empty() && !options.name.empty()) {
      named.name += c10::str(" (", dtype_name(inputs[0].scalar_type()), ")");
    }
    auto of_part = compression;
    if (compression.decoded) {
      of_part.decoded = pick(*compression.decoded, places);
    }
    works.push_back(mix_part(list_signature(kind, inputs, tensors), title, inputs, part, named, of_part, make));
    for (size_t i = 0; i < places.size(); ++i) {
      results[places[i]] = part[i];
    }
  }
  return works.size() == 1 ? works[0] : when_all(OpType::UNKNOWN, std::move(works), std::move(results));
}

WorkPtr ProcessGroupFog::neighbor_allreduce(
    const Tensors& tensors,
    const NeighborPlan& plan,
    const std::optional<Tensors>& outputs,
    const CallOptions& options,
    const Compression& compression) {
  constexpr auto kKind = OpKind::kNeighborAllreduce;
  const char* op = name_of(kKind);
  check_plan(op, plan, "rank", rank_, size_);
  check_mix(op, tensors, outputs);
  check_compression(op, compression, tensors, outputs);
  const auto device = neighbors_of(op, tensors, outputs);
  if (device && compression.codec) {
    return through_host(op, tensors, outputs, compression, [&](const Tensors& here, const Compression& given) {
      return neighbor_allreduce(here, plan, std::nullopt, options, given);
    });
  }
  if (device) {
    const auto parts = by_dtype(tensors);
    if (confirms(options)) {
      const auto signature = list_signature(kKind, pick(tensors, parts[0]), tensors);
      compare(signature, ranks_of(plan.sources()), ranks_of(plan.destinations()), options);
    }
    return device->neighbor_allreduce(tensors, parts, plan, outputs ? *outputs : empty_like(tensors, parts));
  }
  return mix(
      kKind, "fog:neighbor_allreduce", tensors, outputs, options, compression,
      [&](Signature signature, const Encoding& encoding, const void* in, void* out, size_t numel) -> std::shared_ptr<Operation> {
        if (encoding.codec) {
          return std::make_shared<CompressedNeighborAllreduce>(signature, plan, encoding, in, out, numel);
        }
        return std::make_shared<NeighborAllreduce>(signature, plan, in, out, numel);
      });
}

// Each rank of a machine mixes its own slice: with different plans the slices would not fit together.
void ProcessGroupFog::compare_plans(
    Signature signature, const Machines& machines, const NeighborPlan& plan, const CallOptions& options) {
  auto sources = machines.local();
  auto destinations = machines.local();
  for (const auto& source : plan.sources()) {
    sources.push_back(machines.rank(source.rank, machines.place()));
  }
  for (const auto& destination : plan.destinations()) {
    destinations.push_back(machines.rank(destination.rank, machines.place()));
  }
  signature.plan = mark(hash_of(plan));
  const auto peers = compare(signature, std::move(sources), std::move(destinations), options);
  for (size_t place = 0; place < machines.local().size(); ++place) {
    TORCH_CHECK_WITH(
        DistBackendError, peers[place].plan == signature.plan, "ranks disagree: this rank called ", name_of(signature.kind), " with ",
        plan.describe(), " for its machine, rank ", machines.local()[place], " of the same machine with another plan");
  }
}

WorkPtr ProcessGroupFog::local_allreduce(
    at::Tensor& tensor, std::vector<std::vector<int>> machines, const c10d::ReduceOp& op, const CallOptions& options) {
  constexpr const char* kOp = "local_allreduce";
  check_output(kOp, "tensor", tensor, where_is(tensor));
  const Machines layout(kOp, std::move(machines), rank_, size_);
  auto signature = reduction_signature(OpKind::kLocalAllreduce, tensor, op);
  layout.sign(signature);
  const bool adds_floats = (op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG) && at::isFloatingType(tensor.scalar_type());
  const auto device = neighbors_of(kOp, tensor);
  if (device && !adds_floats) {
    return through_host(kOp, {tensor}, Tensors{tensor}, {}, [&](const Tensors& here, const Compression&) {
      auto copy = here[0];
      return local_allreduce(copy, layout.all(), op, options);
    });
  }
  if (device) {
    if (confirms(options)) {
      compare(signature, layout.local(), layout.local(), options);
    }
    return device->local_allreduce(tensor, layout, op.op_ == c10d::ReduceOp::AVG);
  }
  std::vector<int> hosts;
  for (const int member : layout.local()) {
    hosts.push_back(group_->members[member].host);
  }
  return allreduce_among(signature, "fog:local_allreduce", tensor, op, layout_of(layout.local(), hosts, rank_), options);
}

WorkPtr ProcessGroupFog::hierarchical_neighbor_allreduce(
    const Tensors& tensors,
    std::vector<std::vector<int>> machines,
    const NeighborPlan& plan,
    const std::optional<Tensors>& outputs,
    const CallOptions& options,
    const Compression& compression) {
  constexpr auto kKind = OpKind::kHierarchicalNeighborAllreduce;
  const char* op = name_of(kKind);
  const Machines layout(op, std::move(machines), rank_, size_);
  layout.check_equal(op);
  check_plan(op, plan, "rank's machine", layout.machine(), layout.count());
  check_mix(op, tensors, outputs);
  check_compression(op, compression, tensors, outputs);
  const auto device = neighbors_of(op, tensors, outputs);
  if (device && compression.codec) {
    return through_host(op, tensors, outputs, compression, [&](const Tensors& here, const Compression& given) {
      return hierarchical_neighbor_allreduce(here, layout.all(), plan, std::nullopt, options, given);
    });
  }
  if (device) {
    const auto parts = by_dtype(tensors);
    if (confirms(options)) {
      auto signature = list_signature(kKind, pick(tensors, parts[0]), tensors);
      layout.sign(signature);
      compare_plans(signature, layout, plan, options);
    }
    return device->hierarchical_neighbor_allreduce(tensors, parts, layout, plan, outputs ? *outputs : empty_like(tensors, parts));
  }
  return mix(
      kKind, "fog:hierarchical_neighbor_allreduce", tensors, outputs, options, compression,
      [&](Signature signature, const Encoding& encoding, const void* in, void* out, size_t numel) {
        layout.sign(signature);
        signature.plan = mark(hash_of(plan));
        return std::make_shared<HierarchicalNeighborAllreduce>(signature, layout, plan, encoding, in, out, numel);
      });
}

WorkPtr ProcessGroupFog::gather_concat(
    const at::Tensor& tensor, OpKind kind, std::vector<int> sources, std::vector<int> destinations, const CallOptions& options) {
  const char* op = name_of(kind);
  check_tensor(op, "tensor", tensor, where_is(tensor));
  TORCH_CHECK_VALUE(
      tensor.dim() > 0, op, ": tensor: got one without dimensions; allowed are 1 or more, results are joined along dimension 0");
  const bool all = kind == OpKind::kAllgatherConcat;
  const auto type = all ? OpType::ALLGATHER : OpType::UNKNOWN;
  const char* title = all ? "fog:allgather_concat" : "fog:neighbor_allgather";
  const auto signature = Signature::of(kind, tensor);
  if (const auto device = neighbors_of(op, tensor)) {
    std::vector<int64_t> rows;
    for (const auto& peer : compare(signature, sources, destinations, options)) {
      rows.push_back(peer.shape[0]);
    }
    return device->gather(op, title, type, tensor, sources, rows, destinations);
  }
  Staging staging;
  const auto staged = staging.input(tensor);
  auto operation = std::make_shared<GatherConcat>(signature, staged, std::move(sources), std::move(destinations));
  return submit(operation, {type, title, {tensor}, {}}, options);
}

WorkPtr ProcessGroupFog::neighbor_allgather(const at::Tensor& tensor, const NeighborPlan& plan, const CallOptions& options) {
  check_plan("neighbor_allgather", plan, "rank", rank_, size_);
  return gather_concat(tensor, OpKind::kNeighborAllgather, ranks_of(plan.sources()), ranks_of(plan.destinations()), options);
}

WorkPtr ProcessGroupFog::allgather_concat(const at::Tensor& tensor, const CallOptions& options) {
  std::vector<int> everyone(size_);
  std::iota(everyone.begin(), everyone.end(), 0);
  return gather_concat(tensor, OpKind::kAllgatherConcat, everyone, everyone, options);
}

} // namespace fog
