// fog's own operations on tensors that a delegate serves: groups of the delegate's sends and receives, and weighted
// sums on the device.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "device/device_backends.hpp"
#include "core/machines.hpp"
#include "core/neighbor_plan.hpp"
#include "device/stream.hpp"
#include "device/work.hpp"

namespace fog::device {

// The operations of one group on one device, in order, on a separate stream that begins after the program's current
// stream at the time of the call. The host only queues work for the device and does not wait, except in the first
// operation: NCCL then connects all ranks of the group, so all of them must call any of these operations on this
// device.
//
// The caller checks the arguments. Outputs and inputs are the program's: they may have any strides and belong to its
// current stream. Operations with messages are matched on all ranks by the order of the calls. Thread-safe: a group of
// messages stays together.
//
// A sender's weight other than 1 is applied before sending, and the product is rounded to the dtype. Weighted sums are
// rounded as combine() says; all other results have the bits of the CPU's result.
class Neighbors {
 public:
  using Tensors = std::vector<at::Tensor>;
  // Indices of a list's tensors, by dtype: the tensors of one dtype are one message to each peer.
  using Parts = std::vector<std::vector<size_t>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Groups of messages pass the delegate's gate. Throws RuntimeError while the device's stream is captured into a
  // graph: the first operation connects the ranks, which a graph cannot contain.
  Neighbors(BackendPtr delegate, std::shared_ptr<DelegateGate> gate, int rank, std::string group, const at::Device& device);

  // Sets `outputs[i]` to the weighted sum of the peers' i-th tensors. An output may be its tensor.
  WorkPtr neighbor_allreduce(const Tensors& tensors, const Parts& parts, const NeighborPlan& plan, const Tensors& outputs);
  // The same between machines; each contributes the mean of its ranks, rounded to the dtype. Each rank averages and
  // mixes a slice.
  WorkPtr hierarchical_neighbor_allreduce(
      const Tensors& tensors, const Parts& parts, const Machines& machines, const NeighborPlan& plan, const Tensors& outputs);
  // The sum of floating-point numbers over the ranks of this machine, or their mean, in place, in the types and the order of
  // fog::reduce() on the CPU.
  WorkPtr local_allreduce(const at::Tensor& tensor, const Machines& machines, bool average);
  // Concatenates the sources' tensors along dimension 0; the i-th source has `rows[i]` rows. Both lists may contain
  // this rank.
  WorkPtr gather(
      const char* op,
      const char* title,
      c10d::OpType type,
      const at::Tensor& tensor,
      const std::vector<int>& sources,
      const std::vector<int64_t>& rows,
      const std::vector<int>& destinations);
  // One of the delegate's collectives, in place. The tensor may be non-contiguous; `start` gets a contiguous one.
  using Start = std::function<WorkPtr(c10d::Backend& delegate, Tensors& tensors)>;
  WorkPtr collective(const char* op, const char* title, c10d::OpType type, const at::Tensor& tensor, const Start& start);

 private:
  struct Message {
    int peer;
    at::Tensor tensor; // contiguous
  };
  using Messages = std::vector<Message>;
  using Works = std::vector<WorkPtr>;
  struct Call {
    const char* op;
    const char* title; // in the profiler
    c10d::OpType type;
  };
  // The vectors of one weighted sum: this rank's own input, and the result.
  struct Mix {
    at::Tensor own;
    at::Tensor out;
  };

  // Runs `body`, which fills in works, on the stream.
  WorkPtr run(const Call& call, const Tensors& inputs, const Tensors& outputs, const std::function<void(Works& works)>& body);
  // Sends and receives a group of messages; the stream continues when they have arrived.
  void exchange(const Messages& sends, const Messages& receives, Works& works);
  // Exchanges and sums; `rank_of` maps a number in the plan to a rank.
  using RankOf = std::function<int(int)>;
  void mix(const std::vector<Mix>& mixes, const NeighborPlan& plan, const RankOf& rank_of, Works& works);
  void mix_round(const std::vector<Mix>& mixes, const NeighborPlan& plan, const RankOf& rank_of, Works& works);

  const BackendPtr delegate_;
  const std::shared_ptr<DelegateGate> gate_;
  const int rank_;
  const std::string group_;
  const at::Device device_;
  const Stream stream_;
  std::mutex mutex_;
  uint64_t sequence_ = 0;
  bool connected_ = false;
};

} // namespace fog::device
