// What a rank asks for in one operation: the part that every rank must agree on. It travels in each message's header, so
// that two ranks that disagree both learn what the other one asked for.
#pragma once

#include <array>
#include <cstddef>
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
  kAllreduceSparse,
  kMonitoredBarrier,
  kHierarchicalNeighborAllreduce,
  kLocalAllreduce,
  kAgree,
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
  uint32_t tensors = 0; // of a list that is exchanged as one; 0: it is a single tensor
  uint32_t machines = 0; // that the ranks are divided among; 0: they are not
  uint32_t layout = 0; // mark() of what these two numbers leave open: shapes and dtypes, ranks of machines
  uint32_t plan = 0; // mark() of a plan on which the ranks of one machine agree, and no others

  static Signature of(OpKind kind, const at::Tensor& tensor);

  // Same op, dtype, reduction, root, shape and layout, except where ranks may differ: all-to-all in every size, gathers of unequal
  // tensors in the first dimension, and a send and its receive in the shape for one number of elements.
  bool agrees_with(const Signature& other) const;

  // "allreduce(SUM, float32[3, 4])"
  std::string describe() const;
};

// Goes on with a hash, which is the same on every rank whatever the standard library's own is (FNV-1a).
uint64_t hash_more(uint64_t hash, const void* bytes, size_t count);
inline uint64_t hash_more(uint64_t hash, int64_t number) {
  return hash_more(hash, &number, sizeof(number));
}
constexpr uint64_t kEmptyHash = 1469598103934665603ULL;

// What stands for hashed contents in a Signature; never 0.
uint32_t mark(uint64_t hash);

} // namespace fog
