// What a rank asks for in one operation: the part that every rank must agree on. It travels in each message's header, so
// that two ranks that disagree both learn what the other one asked for.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

namespace fog {

enum class OpKind : uint8_t {
  kAllreduce = 1,
  kBroadcast,
  kReduce,
  kAllgather,
  kGather,
  kScatter,
  kReduceScatter,
  kAlltoall,
  kBarrier,
  kPointToPoint,
  kNeighborAllreduce,
  kNeighborAllgather,
  kAllgatherConcat,
};

const char* name_of(OpKind kind);

// Trivially copyable; sent as bytes between processes of one build.
struct Signature {
  static constexpr int kMaxDims = 6; // further dimensions count in numel only

  OpKind kind = OpKind::kBarrier;
  int8_t dtype = -1; // c10::ScalarType, -1: no data
  uint8_t reduce_op = c10d::ReduceOp::UNUSED;
  uint8_t dims = 0;
  int32_t root = -1;
  int64_t numel = 0;
  std::array<int64_t, kMaxDims> shape = {};

  static Signature of(OpKind kind, const at::Tensor& tensor);

  // Same op, dtype, reduction and root; and number of elements, except where ranks may differ in it (all-to-all, gathers
  // of tensors with different first dimensions). Neighbor averages want the same shape as well.
  bool agrees_with(const Signature& other) const;

  // "allreduce(SUM, float32[3, 4])"
  std::string describe() const;
};

} // namespace fog
