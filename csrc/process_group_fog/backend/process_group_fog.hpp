// The c10d backend "fog".
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <c10/util/FunctionRef.h>
#include <c10/util/SmallVector.h>

#include "core/codecs/codec.hpp"
#include "device/device_backends.hpp"
#include "engine/group.hpp"
#include "core/neighbor_plan.hpp"
#include "engine/work.hpp"

namespace fog {

struct Encoding;

class Machines;
class Staging;
class Window;
struct Part;

namespace device {
class Neighbors;
} // namespace device

// Serves every collective of c10d for CPU tensors, and neighbor collectives beside them. It checks arguments,
// stages non-contiguous tensors, and passes operations to the engine, which keeps them as long as it or their Work
// needs them. It has no threads of its own. Delegates serve the collectives of tensors on other devices: see
// DeviceBackends.
//
// Contract: operations of one group start in program order, the same on every rank; several may be in flight. Bad
// arguments raise ValueError or TypeError before anything is sent. A failure in flight raises DistBackendError on every
// rank of the group, and from then on the group refuses work.
class ProcessGroupFog : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout) : c10d::Backend::Options("fog", timeout) {}

    // torch 2.15 and later create the options of child groups with it; older versions have no such function.
    c10::intrusive_ptr<c10d::Backend::Options> clone() const {
      return c10::make_intrusive<Options>(*this);
    }

    // Whether ranks that only send in an operation (for example the root of a broadcast) wait until the receivers have
    // accepted their messages. Without it they do not wait, and learn of a disagreement only at their next operation.
    bool confirm = false;
  };

  // Blocks until all `size` ranks have come to `store`. `known`: an older group of this process that contains them, if
  // there is one, and `known_ranks` their ranks in it. Then the end of one of them ends the wait.
  ProcessGroupFog(
      const c10::intrusive_ptr<c10d::Store>& store,
      int rank,
      int size,
      c10::intrusive_ptr<Options> options,
      const ProcessGroupFog* known = nullptr,
      std::vector<int> known_ranks = {});
  // For ranks that have met. `engine_owner` keeps the group's engine alive, unless it is the process's. `store` is for
  // delegates of devices.
  ProcessGroupFog(
      std::shared_ptr<Group> group,
      c10::intrusive_ptr<Options> options,
      std::shared_ptr<void> engine_owner,
      const c10::intrusive_ptr<c10d::Store>& store = nullptr);
  ~ProcessGroupFog() override;

  const std::string getBackendName() const override {
    return "fog";
  }
  // A copy: up to torch 2.14, ProcessGroup::splitGroup() writes the child's name and timeout into the result.
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
  // SUM of sparse COO tensors; the result is coalesced. Each rank's tensors may have different entries. allreduce()
  // takes sparse tensors as well.
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
  // Blocks. If ranks do not come in time, rank 0 throws an error that names them (only the first of them unless
  // `wait_all_ranks`); the others throw rank 0's report.
  void monitoredBarrier(const c10d::BarrierOptions& options = c10d::BarrierOptions(), bool wait_all_ranks = false) override;

  // Creates a group for `ranks` of this one. All of `ranks` must call it; it returns null on other ranks. A rank's
  // index in `ranks` is its rank in the new group, which meets at `store`.
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  // Creates a group of the `size` ranks that meet at `store`, independent of their present groups.
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

#ifdef C10D_BACKEND_HAS_RECONFIGURE // torch 2.14 and later
  // If the option `enable_reconfigure` is set: the ranks that have met are the group's possible members, and it takes no
  // work before the first reconfigure().
  bool supportsReconfigure() const override {
    return options_->enable_reconfigure;
  }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  // Blocks until all given members have come. If that fails, the group stays as it was.
  c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& given) override;
#endif

  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  // Creates the delegate of a device now, and connects it.
  void eagerConnectSingleDevice(at::Device device) override;
  // The next three use the delegate of the process's accelerator.
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override;
  bool supportsTensorAlloc(c10::DeviceIndex index) override;
  // The following use delegates too, if there are any.
#ifdef C10D_BACKEND_HAS_HOOKS
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
#endif
  void enableCollectivesTiming() override;
  void setGroupUid(const std::string& uid) override;
  // Sequence numbers count from 0 on every rank, so the ranks need not agree on them.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // --- fog's own operations ---
  // On tensors of other devices, they are groups of the delegate's messages: see device::Neighbors. There operations
  // are matched by the order of calls, regardless of names, and the timeout is the delegate's. With `confirm`, the
  // peers first compare their calls on the host, where `name` and `timeout` apply. A gather always compares, because
  // its peers need each other's numbers of rows. A compressed exchange goes through the host.
  //
  // `name`, if given, is the operation's rendezvous key instead of its place in program order.
  struct CallOptions {
    std::string name;
    std::optional<bool> confirm; // default: the group's option
    std::optional<std::chrono::milliseconds> timeout;
    // Whether the caller waits at once, so that no other thread has to drive the operation.
    bool waits = false;
  };
  using Tensors = std::vector<at::Tensor>;
  // How a neighbor exchange encodes its messages: see CompressedNeighborAllreduce. Throws ValueError for dtypes for which
  // the codec is not defined.
  struct Compression {
    std::shared_ptr<const Codec> codec; // null if it does not
    // One tensor for each given tensor. The own term is then the decoded own message, which is written there.
    std::optional<Tensors> decoded = std::nullopt;
    // Whether the exchange conserves the sum over all ranks: see Encoding.
    bool conserve = false;
  };
  // The Work's result is `outputs`, or otherwise new tensors: see NeighborAllreduce. All tensors of one dtype are
  // exchanged together, in the order in which dtypes first appear. Tensors and outputs that are contiguous in one
  // storage are not copied; new outputs are contiguous. An output may be its tensor.
  c10::intrusive_ptr<c10d::Work> neighbor_allreduce(
      const Tensors& tensors,
      const NeighborPlan& plan,
      const std::optional<Tensors>& outputs,
      const CallOptions& options,
      const Compression& compression);
  // The same between machines; each contributes the mean of its ranks: see HierarchicalNeighborAllreduce. `machines`
  // are the ranks of each machine, the same number for each; `plan` is that of this rank's machine among them.
  c10::intrusive_ptr<c10d::Work> hierarchical_neighbor_allreduce(
      const Tensors& tensors,
      std::vector<std::vector<int>> machines,
      const NeighborPlan& plan,
      const std::optional<Tensors>& outputs,
      const CallOptions& options,
      const Compression& compression);
  // allreduce, in place, among the ranks of this rank's machine.
  c10::intrusive_ptr<c10d::Work> local_allreduce(
      at::Tensor& tensor, std::vector<std::vector<int>> machines, const c10d::ReduceOp& op, const CallOptions& options);
  // The Work's result is the concatenation of the sources' tensors along dimension 0 in the plan's order.
  c10::intrusive_ptr<c10d::Work> neighbor_allgather(const at::Tensor& tensor, const NeighborPlan& plan, const CallOptions& options);
  // The Work's result is the concatenation of all ranks' tensors along dimension 0; first dimensions may differ.
  c10::intrusive_ptr<c10d::Work> allgather_concat(const at::Tensor& tensor, const CallOptions& options);
  // Sums all ranks' numbers, unsigned 64-bit numbers that wrap around, in place. If each rank adds a number for
  // everything that it sends and subtracts a number for everything that it expects, zeros mean that the ranks agree.
  c10::intrusive_ptr<c10d::Work> agree(at::Tensor& sums, const CallOptions& options);
  c10::intrusive_ptr<c10d::Work> allreduce_named(at::Tensor& tensor, const c10d::ReduceOp& op, const CallOptions& options);
  c10::intrusive_ptr<c10d::Work> broadcast_named(at::Tensor& tensor, int root, const CallOptions& options);

  // Collective: see Window. Moves the tensor's storage into shared memory.
  std::shared_ptr<Window> create_window(
      const at::Tensor& tensor,
      const std::string& name,
      std::vector<int> in_neighbors,
      std::vector<int> out_neighbors,
      bool zero_init,
      std::optional<std::chrono::milliseconds> timeout);

  // The backend that serves tensors of this type of device, if it has been created.
  BackendPtr delegate(const std::string& device_type) const {
    return device_backends_->made(at::Device(device_type).type());
  }
  // A group of some of this group's ranks, this one among them, over the same engine. It needs no meeting, so it can be
  // created after this group has failed. Each of `ranks` makes the same call; `number` is used once.
  c10::intrusive_ptr<ProcessGroupFog> part(
      const std::vector<int>& ranks,
      uint64_t number,
      const c10::intrusive_ptr<c10d::Store>& store,
      const c10::intrusive_ptr<Options>& options) const;
  // Makes the ends of these ranks known to this one, also if it exchanges nothing with them.
  void watch(const std::vector<int>& ranks) const;
  // For what the engine knows about the group.
  const std::shared_ptr<Group>& group() const {
    return group_;
  }
  // Ranks of the group on this process's host, including this one, ascending.
  std::vector<int> local_ranks() const;
  // Host number of every rank, in the order of first appearance.
  std::vector<int> hosts() const;
  // The rank in the world of every rank.
  std::vector<int> world_ranks() const;
  // Sets it in seconds, for all groups of the process, see Liveness; 0: no rank that still runs is declared lost.
  void set_lost_after(double seconds);
  // How large data travels to that rank: "shared memory", "rma" or "tcp". Throws ValueError unless it is
  // another rank.
  std::string transport(int rank) const;

 private:
  // The description of an operation for its Work.
  struct Call {
    c10d::OpType type;
    const char* title; // in the profiler
    at::TensorList inputs; // the caller's, for the profiler
    std::vector<at::Tensor> outputs; // the result of result()
  };

  void close();
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  void await_reconfiguration();
  void check_reconfigures(const char* op) const;
  std::vector<int> ranks_of_handles(const c10d::ReconfigureOptions& given) const;
  std::shared_ptr<Group> exchange_group(std::shared_ptr<Group> group);
#endif
  std::shared_ptr<DeviceBackends> make_device_backends(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);
  // Gives a delegate the properties of this backend, and aborts it once a member of the group is lost.
  void prepare(const BackendPtr& delegate, const at::Device& device);
  c10::intrusive_ptr<Options> child_options(const char* op, const c10::intrusive_ptr<c10d::Backend::Options>& options) const;
  CallOptions call_options(std::chrono::milliseconds timeout) const;
  // Takes the options that all of c10d's operations have.
  template <typename C10dOptions>
  CallOptions call_options(const C10dOptions& options) const {
    auto call = call_options(options.timeout);
    call.waits = !options.asyncOp;
    return call;
  }
  c10::intrusive_ptr<c10d::Work> submit(const std::shared_ptr<Operation>& operation, Call call, const CallOptions& options);
  // `source` is -1 for a message of any rank.
  c10::intrusive_ptr<c10d::Work> receive(
      const char* op, c10d::OpType type, const char* title, std::vector<at::Tensor>& tensors, int source, int tag);
  // The result has the outputs of all Works in order, unless `outputs` is given.
  c10::intrusive_ptr<c10d::Work> when_all(
      c10d::OpType type, std::vector<c10::intrusive_ptr<c10d::Work>> works, std::optional<Tensors> outputs = std::nullopt);
  // Creates the operation that mixes `numel` elements of the signature's dtype from `in` into `out`, which may be the
  // same.
  using MakeMix = c10::function_ref<std::shared_ptr<Operation>(
      Signature signature, const Encoding& encoding, const void* in, void* out, size_t numel)>;
  c10::intrusive_ptr<c10d::Work> mix(
      OpKind kind,
      const char* title,
      const Tensors& tensors,
      const std::optional<Tensors>& outputs,
      const CallOptions& options,
      const Compression& compression,
      MakeMix make);
  // The same for the tensors of one dtype; creates the `outputs` if there are none.
  c10::intrusive_ptr<c10d::Work> mix_part(
      Signature signature,
      const char* title,
      const Tensors& inputs,
      Tensors& outputs,
      const CallOptions& options,
      const Compression& compression,
      MakeMix make);
  // Codecs, and most reductions, work on the host only: calls `exchange` with copies of a device's tensors there, and copies
  // the results back.
  c10::intrusive_ptr<c10d::Work> through_host(
      const char* op,
      const Tensors& tensors,
      const std::optional<Tensors>& outputs,
      const Compression& compression,
      c10::function_ref<c10::intrusive_ptr<c10d::Work>(const Tensors& here, const Compression& given)> exchange);
  // Returns a Work that is complete once that of start() is, and finish() has used its results. `op` is its name in errors.
  c10::intrusive_ptr<c10d::Work> then(
      c10::function_ref<c10::intrusive_ptr<c10d::Work>()> start,
      Call call,
      const char* op,
      std::function<void(const Tensors& results)> finish);
  using Pointers = c10::SmallVector<const at::Tensor*, 8>;
  // Returns the object that serves fog's own operations on the tensors' device, which must be the same for all; null if
  // fog's transport does. Throws as DeviceBackends::serving(), and ValueError within a coalesced group.
  template <typename... Given>
  std::shared_ptr<device::Neighbors> neighbors_of(const char* op, const Given&... given) {
    Pointers tensors;
    (collect(tensors, given), ...);
    return neighbors_serving(op, tensors);
  }
  std::shared_ptr<device::Neighbors> neighbors_serving(const char* op, c10::ArrayRef<const at::Tensor*> tensors);
  // Compares signatures before an exchange that a delegate carries: the peers check that their calls agree, as an
  // operation of fog's own does. Returns those of the sources. Blocks.
  std::vector<Signature> compare(
      const Signature& signature, std::vector<int> sources, std::vector<int> destinations, const CallOptions& options);
  // Compares them among all ranks, if calls are to be confirmed.
  void compare_everywhere(const Signature& signature, const CallOptions& options);
  // Compares them among the ranks of a machine and its neighbors.
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
  // `inputs` are by rank, in memory of `staging`; these and the output are contiguous.
  c10::intrusive_ptr<c10d::Work> reduce_scatter_parts(
      const Signature& signature,
      const std::vector<Part>& inputs,
      const at::Tensor& output,
      const c10d::ReduceOp& op,
      const Staging& staging,
      const Call& call,
      const CallOptions& options);
  c10::intrusive_ptr<c10d::Work> gather_concat(
      const at::Tensor& tensor, OpKind kind, std::vector<int> sources, std::vector<int> destinations, const CallOptions& options);
  // Returns the call of the delegate that serves the given tensors, in lists or lists of lists; empty if fog serves
  // them.
  template <typename... Given>
  DelegateCall delegate_of(const char* op, const Given&... given) {
    Pointers tensors;
    (collect(tensors, given), ...);
    return device_backends_->serving(op, tensors);
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
  // The device that this group is bound to, or otherwise the process's accelerator.
  at::Device accelerator(const char* op) const;
  void check_ranks(const char* argument, const std::vector<int>& ranks, int size) const;
  void check_root(const char* op, int64_t root) const;
  void check_peer(const char* op, int peer, int tag) const;

  const c10::intrusive_ptr<Options> options_;
  bool is_timing_ = false;
  const std::shared_ptr<DeviceBackends> device_backends_; // a thread that aborts them may keep them alive
  std::mutex neighbors_mutex_;
  std::vector<std::pair<at::Device, std::shared_ptr<device::Neighbors>>> neighbors_; // by device
  // The group that was split off last, by its name.
  std::pair<std::string, c10::weak_intrusive_ptr<c10d::Backend>> last_split_{
      std::string(), c10::weak_intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Backend>())};
  std::shared_ptr<void> engine_owner_; // null if the engine lives until the process ends
  std::shared_ptr<Group> group_;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  std::shared_ptr<Group> world_; // the possible members; null unless they change
  std::unordered_set<int64_t> used_uuids_;
#endif
  bool coalescing_ = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> coalesced_;
};

} // namespace fog
