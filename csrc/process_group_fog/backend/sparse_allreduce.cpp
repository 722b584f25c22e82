// allreduce of sparse tensors: every rank gathers the entries of all ranks, and adds them in rank order.
#include "backend/process_group_fog.hpp"

#include <algorithm>
#include <numeric>

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "backend/arguments.hpp"
#include "collectives/gather_concat.hpp"
#include "core/tensor_checks.hpp"
#include "core/names.hpp"

namespace fog {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

namespace {

// The values that ranks must agree on, unlike the number of entries: dtype, shape and the dimensions of one entry.
Signature entries_signature(const at::Tensor& values, at::IntArrayRef sizes, const c10d::ReduceOp& op) {
  auto signature = reduction_signature(OpKind::kAllreduceSparse, values, op);
  signature.dims = static_cast<uint8_t>(std::min<size_t>(sizes.size() + 1, 255));
  signature.shape = {};
  signature.shape[0] = values.size(0); // the number of entries, in which ranks may differ
  std::copy_n(sizes.begin(), std::min<size_t>(sizes.size(), Signature::kMaxDims - 1), signature.shape.begin() + 1);
  return signature;
}

} // namespace

WorkPtr ProcessGroupFog::allreduce_sparse(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  if (const auto delegate = delegate_of("allreduce", tensors)) {
    return delegate->allreduce_sparse(tensors, options);
  }
  auto tensor = only_tensor("allreduce_sparse", "tensors", tensors);
  TORCH_CHECK_VALUE(
      tensor.device().is_cpu(), "allreduce_sparse: tensors: got a tensor on ", tensor.device(), "; allowed are tensors on cpu");
  TORCH_CHECK_VALUE(
      options.reduceOp.op_ == c10d::ReduceOp::SUM, "allreduce_sparse: op: got ", reduction_name(options.reduceOp.op_),
      "; allowed is SUM");
  const c10::InferenceMode normal(false);
  at::AutoDispatchBelowAutograd guard;
  const auto input = tensor.coalesce();
  const auto indices = input._indices().t().contiguous(); // one entry per row
  const auto values = input._values().contiguous();
  const auto sizes = input.sizes().vec();

  std::vector<int> everyone(size_);
  std::iota(everyone.begin(), everyone.end(), 0);
  const auto call = call_options(options);
  auto gather = [&](const at::Tensor& rows) {
    auto operation = std::make_shared<GatherConcat>(entries_signature(rows, sizes, options.reduceOp), rows, everyone, everyone);
    return submit(operation, {OpType::_ALLREDUCE_SPARSE, nullptr, {rows}, {}}, call);
  };
  const auto start = [&] { return when_all(OpType::_ALLREDUCE_SPARSE, {gather(indices), gather(values)}); };
  const auto finish = [tensor, sizes](const Tensors& parts) {
    const c10::InferenceMode normal(false);
    at::AutoDispatchBelowAutograd guard;
    tensor.copy_(at::_sparse_coo_tensor_unsafe(parts[0].t(), parts[1], sizes).coalesce());
  };
  return then(start, {OpType::_ALLREDUCE_SPARSE, "fog:sparse_all_reduce", tensors, tensors}, "allreduce_sparse", finish);
}

} // namespace fog
