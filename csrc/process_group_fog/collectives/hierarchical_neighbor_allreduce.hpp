#pragma once

#include <optional>
#include <vector>

#include "core/machines.hpp"
#include "core/neighbor_plan.hpp"
#include "engine/operation.hpp"
#include "collectives/compressed_sum.hpp"
#include "collectives/schedule.hpp"

namespace fog {

// Every rank gets neighbor_sum() over machines of the means of each machine's ranks; the plan's ranks are machines.
//
// All ranks of a machine share the work. The tensor is cut into one slice for each place in a machine. Each rank
// averages its slice over its machine (reduce-scatter), exchanges the mean with the ranks of the same place on the
// neighboring machines and mixes it, then sends the result to its machine (allgather). So the link from a machine to
// another carries one tensor, in parts that travel at the same time: the full-lane decomposition of J. L. Traeff
// (arXiv:1910.13373) with a neighbor exchange on the lanes.
//
// With a codec, the means are encoded on the links between machines, each rank's slice by itself; within a machine nothing
// is encoded. A machine's own term is its mean as it is, or as Encoding says; nothing is decoded to the caller.
//
// Rounding: a machine's mean is summed in the order of its ranks, in float64 for float32 and float64 and in float32 for
// float16 and bfloat16, and rounded once to the dtype that the links carry. The machine itself also uses the rounded
// mean: a machine has the same value everywhere, so weights that conserve the sum over machines do so here. Messages
// carry means, because a sum could overflow a float16. The weighted sum over machines is rounded once more. Each
// element is computed by one rank of a machine, in an order that depends only on the machines and the plan, so results
// are bit-equal on all ranks of a machine and in every run.
class HierarchicalNeighborAllreduce : public Operation {
 public:
  // `machines` have equal numbers of ranks. `out` may be `in`.
  HierarchicalNeighborAllreduce(
      Signature signature, Machines machines, NeighborPlan plan, Encoding encoding, const void* in, void* out, size_t numel);

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  // The phases. The first ones are also the numbers of the messages that each phase waits for.
  enum Phase : uint16_t { kAverage, kMix, kGather, kEncode };

  Slice slice(int place) const;
  std::vector<int> other_places() const;
  size_t mixed_bytes() const;
  Action use_messages();
  void start_mixing();
  void check_plans() const;

  const Machines machines_;
  const NeighborPlan plan_;
  const char* const in_;
  char* const out_;
  const size_t numel_;
  const c10::ScalarType dtype_;
  const size_t item_; // bytes per element
  const Slice own_; // this rank's slice, in bytes
  Phase phase_ = kAverage;
  std::vector<size_t> inputs_; // receives by place; this rank's own is unused
  std::vector<size_t> means_; // receives by source
  std::vector<const uint8_t*> messages_; // their data, if means are encoded
  const char* mean_ = nullptr; // mean of this rank's slice over its machine
  std::optional<CompressedSum> sum_; // if means are encoded
  bool encodes_ = false; // whether this rank's mean is encoded
  void* message_ = nullptr; // the encoded mean
  bool summed_ = false; // the decoded means
  char* averaged_ = nullptr; // where the first phase writes the mean; null if the input is the mean
};

} // namespace fog
