// fog's own operations on tensors that a delegate serves: groups of the delegate's sends and receives, and weighted sums on the
// device.
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

// The operations of one group on one device, one after the other on a stream of their own, which begins where the program's current
// stream is at the call. The host only gives the device what to do; it never waits, but for the first operation: NCCL connects all ranks
// of a group then, so all of them must come to one on this device, whichever it is.
//
// Arguments are checked by the caller. Outputs and inputs are the program's: they may be strided in any way, and belong to its current
// stream. What needs a message is matched on all ranks by the order of calls. Thread-safe, in that a group of messages stays whole.
//
// A sender's weight other than 1 is applied, and rounded to the dtype, before it sends. Weighted sums are rounded as combine() says; all
// else has the bits of the CPU's result.
class Neighbors {
 public:
  using Tensors = std::vector<at::Tensor>;
  // Places of a list's tensors, by dtype: those of one dtype are one message to each peer.
  using Parts = std::vector<std::vector<size_t>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // Groups of messages come through the delegate's gate. RuntimeError while the device's stream is captured into a graph: the operation
  // that this is for connects the ranks, which no graph can hold.
  Neighbors(BackendPtr delegate, std::shared_ptr<DelegateGate> gate, int rank, std::string group, const at::Device& device);

  // `outputs[i]` becomes the weighted sum of the peers' i-th tensors. An output may be its tensor.
  WorkPtr neighbor_allreduce(const Tensors& tensors, const Parts& parts, const NeighborPlan& plan, const Tensors& outputs);
  // The same between machines, each of which enters with the mean of its ranks, rounded to the dtype. Each rank averages and mixes a
  // slice.
  WorkPtr hierarchical_neighbor_allreduce(
      const Tensors& tensors, const Parts& parts, const Machines& machines, const NeighborPlan& plan, const Tensors& outputs);
  // A reduction over the ranks of this machine, in place. `factor` is this rank's, for PREMUL_SUM.
  WorkPtr local_allreduce(const at::Tensor& tensor, const Machines& machines, c10d::ReduceOp::RedOpType op, double factor);
  // The sources' tensors one after the other along dimension 0: `rows[i]` of the i-th source. This rank may be among both.
  WorkPtr gather(
      const char* op,
      const char* title,
      c10d::OpType type,
      const at::Tensor& tensor,
      const std::vector<int>& sources,
      const std::vector<int64_t>& rows,
      const std::vector<int>& destinations);
  // One of the delegate's collectives, in place, of a tensor that need not be contiguous: `start` gets one that is.
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
  // What enters one weighted sum, and where the sum goes; vectors.
  struct Mix {
    at::Tensor own;
    at::Tensor out;
  };

  // Runs `body`, which fills in works, on the stream.
  WorkPtr run(const Call& call, const Tensors& inputs, const Tensors& outputs, const std::function<void(Works& works)>& body);
  // One group of messages; the stream goes on when they are there.
  void exchange(const Messages& sends, const Messages& receives, Works& works);
  // Exchanges and sums; `rank_of` gives the rank that a number in the plan stands for.
  using RankOf = std::function<int(int)>;
  void mix(const std::vector<Mix>& mixes, const NeighborPlan& plan, const RankOf& rank_of, Works& works);
  // A matrix whose rows are `count` vectors like `like`, each of which begins where elements can be read at once.
  static at::Tensor empty_rows(size_t count, const at::Tensor& like);

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
