// The arguments of one operation on which all ranks must agree. They are in the header of each message, so if two ranks
// disagree, both learn the arguments of the other.
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

// Trivially copyable: it is sent as bytes between processes of one build.
struct Signature {
  static constexpr int kMaxDims = 6; // further dimensions only count in numel

  OpKind kind = OpKind::kBarrier;
  int8_t dtype = -1; // c10::ScalarType; -1 if there is no data
  uint8_t reduce_op = c10d::ReduceOp::UNUSED;
  uint8_t dims = 0;
  int32_t root = -1;
  int64_t numel = 0;
  std::array<int64_t, kMaxDims> shape = {};
  uint32_t tensors = 0; // number of tensors in a list that is exchanged as one; 0 for a single tensor
  uint32_t machines = 0; // number of machines that the ranks are divided among; 0 if they are not
  uint32_t layout = 0; // mark() of the details behind these two numbers: shapes and dtypes, ranks of machines
  uint32_t plan = 0; // mark() of a plan on which only the ranks of one machine agree
  static constexpr size_t kCodecBytes = 48;
  std::array<char, kCodecBytes> codec = {}; // the text of the codec of the data, ended by a 0; empty if there is none

  static Signature of(OpKind kind, const at::Tensor& tensor);

  // Sets the codec. Of a text that is too long, the end is replaced by a hash.
  void set_codec(const std::string& text);

  // Returns whether op, dtype, reduction, root, shape, layout and codec are the same, except where ranks may differ: an
  // all-to-all in every size, gathers of unequal tensors in the first dimension, and a send and its receive in the
  // shape if the number of elements is the same.
  bool agrees_with(const Signature& other) const;

  // Returns, for example, "allreduce(SUM, float32[3, 4])".
  std::string describe() const;
};

// Continues a hash (FNV-1a), which is the same on every rank, with any standard library.
uint64_t hash_more(uint64_t hash, const void* bytes, size_t count);
inline uint64_t hash_more(uint64_t hash, int64_t number) {
  return hash_more(hash, &number, sizeof(number));
}
constexpr uint64_t kEmptyHash = 1469598103934665603ULL;

// Represents hashed contents in a Signature; never 0.
uint32_t mark(uint64_t hash);

} // namespace fog
