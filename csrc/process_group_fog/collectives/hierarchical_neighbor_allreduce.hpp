#pragma once

#include <vector>

#include "core/machines.hpp"
#include "core/neighbor_plan.hpp"
#include "engine/operation.hpp"
#include "collectives/slices.hpp"

namespace fog {

// Every rank gets neighbor_sum() over machines of the means of each machine's ranks; the plan's ranks are machines.
//
// No rank stands for its machine. The tensor is cut into one slice for each place in a machine, and each rank averages its
// slice over its machine (reduce-scatter), exchanges the mean with the ranks of the same place on the neighboring machines
// and mixes, then gives the result to its machine (allgather). So all ranks share the work, and the link from a machine to
// another carries one tensor, in parts that travel at once: the full-lane decomposition of J. L. Traeff (arXiv:1910.13373) with
// a neighbor exchange on the lanes.
//
// Rounding: a machine's mean is summed in the order of its ranks, in float64 for float32 and float64 and in float32 for
// float16 and bfloat16, and rounded once to the dtype, as that is what the links carry. The machine itself uses the rounded
// mean as well: a machine enters everywhere with the same value, so weights that conserve the sum over machines do so here.
// What travels is a mean and no sum, which could overflow a float16. The weighted sum over machines is rounded once more.
// Each element is computed by one rank of a machine, in an order that depends on nothing but machines and plan: results are
// bit-equal on all ranks of a machine and in every run.
class HierarchicalNeighborAllreduce : public Operation {
 public:
  // `machines` have equal numbers of ranks. `out` may be `in`.
  HierarchicalNeighborAllreduce(Signature signature, Machines machines, NeighborPlan plan, const void* in, void* out, size_t numel);

 protected:
  void launch() override;
  Action advance() override;
  void compute() override;

 private:
  // Also the numbers of the messages that a phase waits for.
  enum Phase : uint16_t { kAverage, kMix, kGather };

  Slice slice(int place) const;
  std::vector<int> other_places() const;
  void start_mixing();
  void check_plans() const;

  const Machines machines_;
  const NeighborPlan plan_;
  const char* const in_;
  char* const out_;
  const size_t numel_;
  const c10::ScalarType dtype_;
  const size_t item_; // bytes of an element
  const Slice own_; // this rank's slice, in bytes
  Phase phase_ = kAverage;
  std::vector<size_t> inputs_; // receives by place; unused for this rank's own
  std::vector<size_t> means_; // receives by source
  const char* mean_ = nullptr; // of this rank's slice over its machine
  char* averaged_ = nullptr; // where the first phase writes it; null: the input is the mean
};

} // namespace fog
