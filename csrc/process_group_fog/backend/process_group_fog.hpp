// The c10d backend "fog".
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>
#include <torch/version.h>

#include "device/device_backends.hpp"
#include "engine/group.hpp"
#include "core/neighbor_plan.hpp"
#include "engine/work.hpp"

namespace fog {

class Machines;
class Window;
struct Part;

namespace device {
class Neighbors;
}

// Serves every collective of c10d for CPU tensors over MPI, and neighbor collectives beside them. It checks arguments,
// stages tensors that are not contiguous, and hands operations to the engine, which runs them for as long as their Work or
// the engine needs; it owns no thread. Collectives of tensors of other devices are their delegate's: see DeviceBackends.
//
// Contract: operations of one group start in program order, the same on every rank; several may be in flight. Bad
// arguments raise ValueError or TypeError before anything is sent. A failure in flight raises DistBackendError on every
// rank of the group, and from then on the group refuses work.
class ProcessGroupFog : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout) : c10d::Backend::Options("fog", timeout) {}

    // What torch 2.15 and later make child groups' options with; older ones have no such function.
    c10::intrusive_ptr<c10d::Backend::Options> clone() const {
      return c10::make_intrusive<Options>(*this);
    }

    // Whether ranks that only send in an operation (the root of a broadcast, say) wait until the receivers have accepted
    // their messages. Without it they learn of a disagreement at their next operation only, and need not wait.
    bool confirm = false;
    // How data goes between hosts: "auto", "rma" or "messages"; "" is what FOG_BETWEEN_HOSTS says. The first group's holds for the process.
    std::string between_hosts;
    // Who does allreduce, reduce and reduce_scatter between hosts: "fog" or "mpi". With MPI's own the death of a rank in the middle may end
    // the others, or leaves them without MPI. "" is what FOG_REDUCE says.
    std::string reduce;
  };

  // Blocks until all `size` ranks have come to `store`.
  ProcessGroupFog(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, c10::intrusive_ptr<Options> options);
  // Of ranks that have met. `engine_owner` keeps the group's engine, if it is not this process's.
  ProcessGroupFog(std::shared_ptr<Group> group, c10::intrusive_ptr<Options> options, std::shared_ptr<void> engine_owner);
  ~ProcessGroupFog() override;

  const std::string getBackendName() const override {
    return "fog";
  }
  // A copy: up to torch 2.14, ProcessGroup::splitGroup() writes the child's name and time-out into what it gets here.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options_->clone();
  }
  bool supportsSplitting() const override {
    return true;
  }
  bool supportsCoalescing() const override {
    return true;
  }

  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options = c10d::BroadcastOptions()) override;
  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options = c10d::AllreduceOptions()) override;
  // SUM of sparse COO tensors, coalesced; every rank's may have its own entries. allreduce() takes them as well.
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options = c10d::AllreduceOptions()) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options = c10d::AllreduceCoalescedOptions()) override;
  c10::intrusive_ptr<c10d::Work> reduce(
      std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options = c10d::ReduceOptions()) override;
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options = c10d::AllgatherOptions()) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options = c10d::AllgatherOptions()) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options = c10d::AllgatherOptions()) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options = c10d::AllgatherOptions()) override;
  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<std::vector<at::Tensor>>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::GatherOptions& options = c10d::GatherOptions()) override;
#ifdef C10D_BACKEND_HAS_WINDOW // torch 2.14 and later
  c10::intrusive_ptr<c10d::Work> gather_single(
      at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& options = c10d::GatherOptions()) override;
#endif
  c10::intrusive_ptr<c10d::Work> scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ScatterOptions& options = c10d::ScatterOptions()) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs,
      std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& options = c10d::ReduceScatterOptions()) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options = c10d::ReduceScatterOptions()) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options = c10d::ReduceScatterOptions()) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options = c10d::AllToAllOptions()) override;
  c10::intrusive_ptr<c10d::Work> alltoall(
      std::vector<at::Tensor>& outputs,
      std::vector<at::Tensor>& inputs,
      const c10d::AllToAllOptions& options = c10d::AllToAllOptions()) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int destination, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options = c10d::BarrierOptions()) override;
  // Blocks. If ranks do not come in time, rank 0 throws an error that names them (the first of them unless
  // `wait_all_ranks`); the others throw what rank 0 reports.
  void monitoredBarrier(const c10d::BarrierOptions& options = c10d::BarrierOptions(), bool wait_all_ranks = false) override;

  // A group of its own for `ranks` of this one, which must all call it; null on ranks that are not among them. Each rank's
  // place in `ranks` is its rank in the new group, which meets at `store`.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  // A group of the `size` ranks that meet at `store`, whatever groups they came from.
  c10::intrusive_ptr<c10d::Backend> merge(
      const c10::intrusive_ptr<c10d::Store>& store,
      const c10::intrusive_ptr<c10d::Backend::Options>& options,
      const int& rank,
      const int& size) override;

#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override {
    return true;
  }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor = std::nullopt) override;
#endif

  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  // Makes the delegate of a device now, and connects it: from then on split() splits it too.
  void eagerConnectSingleDevice(at::Device device) override;
  // The next three are the delegate's of the process's accelerator.
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override;
  bool supportsTensorAlloc(c10::DeviceIndex index) override;
  // Those that follow are delegates' too, of which there may be none.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  void suspend() override;
  void resume() override;
  std::unordered_map<std::string, uint64_t> getMemoryStats() override;
#endif
#ifdef C10D_BACKEND_HAS_HOOKS
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
#endif
  void enableCollectivesTiming() override;
  void setGroupUid(const std::string& uid) override;
  // Sequence numbers count from 0 on every rank; there is nothing to agree on.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // --- fog's own operations ---
  // Those on tensors of other devices are groups of the delegate's messages: see device::Neighbors. There the order of calls counts
  // whatever their names are, and the time-out is the delegate's. With `confirm` the peers compare beforehand, on the host, what they
  // call, where `name` and `timeout` hold; so do those of a gather, who need each other's numbers of rows.
  //
  // `name`, if given, is the operation's rendezvous key instead of its place in program order.
  struct CallOptions {
    std::string name;
    std::optional<bool> confirm; // by default as in the group's options
    std::optional<std::chrono::milliseconds> timeout;
    // Whether the caller waits at once, so that nobody else has to look after the operation meanwhile.
    bool waits = false;
  };
  using Tensors = std::vector<at::Tensor>;
  // The Work's result is `outputs`, or else new tensors: see NeighborAllreduce. All tensors of one dtype are one exchange, in
  // the order in which dtypes first appear. No copy is made of tensors that lie one after the other in one storage, nor of
  // outputs that do; those that are made here do. An output may be its tensor.
  c10::intrusive_ptr<c10d::Work> neighbor_allreduce(
      const Tensors& tensors, const NeighborPlan& plan, const std::optional<Tensors>& outputs, const CallOptions& options);
  // The same between machines, each of which enters with the mean of its ranks: see HierarchicalNeighborAllreduce. `machines`
  // are the ranks of each machine, equally many; `plan` is that of this rank's machine among them.
  c10::intrusive_ptr<c10d::Work> hierarchical_neighbor_allreduce(
      const Tensors& tensors,
      std::vector<std::vector<int>> machines,
      const NeighborPlan& plan,
      const std::optional<Tensors>& outputs,
      const CallOptions& options);
  // allreduce, in place, among the ranks of this rank's machine.
  c10::intrusive_ptr<c10d::Work> local_allreduce(
      at::Tensor& tensor, std::vector<std::vector<int>> machines, const c10d::ReduceOp& op, const CallOptions& options);
  // The Work's result is the sources' tensors, one after the other along dimension 0 in the plan's order.
  c10::intrusive_ptr<c10d::Work> neighbor_allgather(const at::Tensor& tensor, const NeighborPlan& plan, const CallOptions& options);
  // The Work's result is all ranks' tensors along dimension 0; first dimensions may differ.
  c10::intrusive_ptr<c10d::Work> allgather_concat(const at::Tensor& tensor, const CallOptions& options);
  // Sums all ranks' numbers, unsigned ones of 64 bits that wrap, in place. Zeros say that the ranks agree, if each has added what stands for
  // what it gives and subtracted what stands for what it takes.
  c10::intrusive_ptr<c10d::Work> agree(at::Tensor& sums, const CallOptions& options);
  c10::intrusive_ptr<c10d::Work> allreduce_named(at::Tensor& tensor, const c10d::ReduceOp& op, const CallOptions& options);
  c10::intrusive_ptr<c10d::Work> broadcast_named(at::Tensor& tensor, int root, const CallOptions& options);

  // Collective: see Window. The tensor's storage moves into shared memory.
  std::shared_ptr<Window> create_window(
      const at::Tensor& tensor,
      const std::string& name,
      std::vector<int> in_neighbors,
      std::vector<int> out_neighbors,
      bool zero_init,
      std::optional<std::chrono::milliseconds> timeout);

  // The backend that serves tensors of this type of device, if one has been made.
  BackendPtr delegate(const std::string& device_type) const {
    return device_backends_.made(at::Device(device_type).type());
  }
  // Ranks of the group on this process's host, this one included, ascending.
  std::vector<int> local_ranks() const;
  // Host number of every rank, by first appearance.
  std::vector<int> hosts() const;
  // Messages that its operations have sent from here, and bytes of data in them.
  std::pair<uint64_t, uint64_t> sent() const;
  // By rank: what was exchanged while somebody observed, see Engine::observe().
  std::unordered_map<int, PeerTraffic> traffic() const;
  // How large data goes to that rank: "shared memory", "rma" or "messages". Throws ValueError if it is no other rank.
  std::string transport(int rank) const;

 private:
  // What the Work says of an operation.
  struct Call {
    c10d::OpType type;
    const char* title; // in the profiler
    at::TensorList inputs; // the caller's, for the profiler
    std::vector<at::Tensor> outputs; // result()
  };

  c10::intrusive_ptr<Options> child_options(const char* op, const c10::intrusive_ptr<c10d::Backend::Options>& options) const;
  CallOptions call_options(std::chrono::milliseconds timeout) const;
  // Those of c10d's options that all operations have.
  template <typename C10dOptions>
  CallOptions call_options(const C10dOptions& options) const {
    auto call = call_options(options.timeout);
    call.waits = !options.asyncOp;
    return call;
  }
  c10::intrusive_ptr<c10d::Work> submit(const std::shared_ptr<Operation>& operation, Call call, const CallOptions& options);
  // With the outputs of all works, one after the other, unless others are given.
  c10::intrusive_ptr<c10d::Work> when_all(
      c10d::OpType type, std::vector<c10::intrusive_ptr<c10d::Work>> works, std::optional<Tensors> outputs = std::nullopt);
  // Makes the operation that mixes `numel` elements of the signature's dtype from `in` into `out`, which may be the same.
  using MakeMix = c10::function_ref<std::shared_ptr<Operation>(Signature signature, const void* in, void* out, size_t numel)>;
  c10::intrusive_ptr<c10d::Work> mix(
      OpKind kind,
      const char* title,
      const Tensors& tensors,
      const std::optional<Tensors>& outputs,
      const CallOptions& options,
      MakeMix make);
  // The same for tensors of one dtype; `outputs` are new ones if there are none.
  c10::intrusive_ptr<c10d::Work> mix_part(
      Signature signature, const char* title, const Tensors& inputs, Tensors& outputs, const CallOptions& options, MakeMix make);
  using Pointers = c10::SmallVector<const at::Tensor*, 8>;
  // What serves fog's own operations on the tensors' device, which is the same for all; null if their transport is fog's. Throws as
  // DeviceBackends::serving(), and ValueError within a coalesced group.
  template <typename... Given>
  std::shared_ptr<device::Neighbors> neighbors_of(const char* op, const Given&... given) {
    Pointers tensors;
    (collect(tensors, given), ...);
    return neighbors_serving(op, tensors);
  }
  std::shared_ptr<device::Neighbors> neighbors_serving(const char* op, c10::ArrayRef<const at::Tensor*> tensors);
  // Before an exchange that somebody else carries: its peers see that they ask for the same, as they would in an operation of fog's own.
  // What the sources ask for. Blocks.
  std::vector<Signature> compare(
      const Signature& signature, std::vector<int> sources, std::vector<int> destinations, const CallOptions& options);
  // Among all ranks, where calls are to be confirmed.
  void compare_everywhere(const Signature& signature, const CallOptions& options);
  void compare_plans(Signature signature, const Machines& machines, const NeighborPlan& plan, const CallOptions& options);
  bool confirms(const CallOptions& options) const {
    return options.confirm.value_or(options_->confirm);
  }
  c10::intrusive_ptr<c10d::Work> allreduce_among(
      Signature signature,
      const char* title,
      at::Tensor& tensor,
      const c10d::ReduceOp& op,
      const Layout& layout,
      const CallOptions& options);
  // `inputs` are by rank, in the memory of `kept`; these and the output are contiguous.
  c10::intrusive_ptr<c10d::Work> reduce_scatter_parts(
      const Signature& signature,
      const std::vector<Part>& inputs,
      const Tensors& kept,
      const at::Tensor& output,
      const c10d::ReduceOp& op,
      const std::function<void()>& epilogue,
      const Call& call,
      const CallOptions& options);
  c10::intrusive_ptr<c10d::Work> gather_concat(
      const at::Tensor& tensor, OpKind kind, std::vector<int> sources, std::vector<int> destinations, const CallOptions& options);
  // allgather of several tensors a rank as one operation: flat[r * inputs.size() + i] takes rank r's i-th input.
  c10::intrusive_ptr<c10d::Work> allgather_flat(
      c10d::OpType type,
      const std::vector<at::Tensor>& inputs,
      const std::vector<std::vector<at::Tensor>>& outputs,
      const CallOptions& options);
  // The call of the delegate that serves the tensors given, in lists or lists of lists; none if this does.
  template <typename... Given>
  DelegateCall delegate_of(const char* op, const Given&... given) {
    Pointers tensors;
    (collect(tensors, given), ...);
    return device_backends_.serving(op, tensors);
  }
  static void collect(Pointers& tensors, const at::Tensor& tensor) {
    tensors.push_back(&tensor);
  }
  template <typename Given>
  static void collect(Pointers& tensors, const std::optional<Given>& given) {
    if (given) {
      collect(tensors, *given);
    }
  }
  template <typename Given>
  static void collect(Pointers& tensors, const std::vector<Given>& list) {
    for (const auto& each : list) {
      collect(tensors, each);
    }
  }
  // The device that this group is bound to, or else that of the process.
  at::Device accelerator(const char* op) const;
  void check_root(const char* op, int64_t root) const;
  void check_peer(const char* op, int peer, int tag) const;

  const c10::intrusive_ptr<Options> options_;
  bool is_timing_ = false;
  DeviceBackends device_backends_;
  std::mutex neighbors_mutex_;
  std::vector<std::pair<at::Device, std::shared_ptr<device::Neighbors>>> neighbors_; // by device
  // The group that was split off last, by its name.
  std::pair<std::string, c10::weak_intrusive_ptr<c10d::Backend>> last_split_{
      std::string(), c10::weak_intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Backend>())};
  std::shared_ptr<void> engine_owner_; // null: it lives until the process ends
  std::shared_ptr<Group> group_;
  bool coalescing_ = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> coalesced_;
};

} // namespace fog
