// RecordingDelegate: a c10d backend for tensors of the fake device that behaves like ProcessGroupNCCL, over Gloo.
#include <map>
#include <optional>
#include <utility>
#include <variant>

#include <ATen/Functions.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/utils/tensor_dtypes.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Dtype.h>

#include "device.hpp"

namespace py = pybind11;

namespace device_double {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using Works = std::vector<WorkPtr>;
using Milliseconds = std::chrono::milliseconds;

// --- recorded calls ---

struct TensorInfo {
  std::vector<int64_t> shape;
  at::ScalarType dtype;
  std::string device;
};

using Value = std::variant<int64_t, bool, std::string, std::vector<int64_t>>;
using Values = std::map<std::string, Value>;

struct Call {
  std::string name;
  std::vector<TensorInfo> tensors;
  Values options;
  std::vector<Call> parts; // of a coalesced group
};

py::dict to_python(const Call& call) {
  py::dict dict;
  dict["name"] = call.name;
  for (const auto& [name, value] : call.options) {
    dict[name.c_str()] = std::visit([](const auto& each) { return py::cast(each); }, value);
  }
  if (call.name == "coalesced") {
    py::list parts;
    for (const auto& part : call.parts) {
      parts.append(to_python(part));
    }
    dict["calls"] = parts;
    return dict;
  }
  py::list tensors;
  for (const auto& [shape, dtype, device] : call.tensors) {
    tensors.append(
        py::make_tuple(
            py::tuple(py::cast(shape)), py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype))),
            device));
  }
  dict["tensors"] = tensors;
  return dict;
}

std::string name_of(const c10d::ReduceOp& op) {
  static const char* names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return names[static_cast<int>(op.op_)];
}

// --- Work ---

// The state of one operation, shared by its streams and the host.
struct Outcome {
  std::mutex mutex;
  std::exception_ptr failure;
};

// Like ProcessGroupNCCL's Work: wait() orders the current stream after the operation. It waits for the device only with a
// timeout, or for a barrier.
class DelegateWork : public c10d::Work {
 public:
  // The operation's stream must be current here.
  DelegateWork(
      int rank, c10d::OpType type, const Tensors& inputs, Tensors outputs, Tensors stash, std::shared_ptr<Outcome> outcome, bool blocks)
      : c10d::Work(rank, type, "double", inputs),
        outputs_(std::move(outputs)),
        stash_(std::move(stash)),
        outcome_(std::move(outcome)),
        blocks_(blocks),
        end_(kDevice) {
    const auto stream = current_stream(-1);
    end_.record(stream);
    marker_ = queue_of(stream).mark();
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    future_->markCompleted(c10::IValue(outputs_));
  }

  // Like ProcessGroupNCCL's Works, which check for errors only here.
  bool isCompleted() override {
    {
      const std::lock_guard<std::mutex> lock(outcome_->mutex);
      seen_ = outcome_->failure;
    }
    return exception() != nullptr || end_.query();
  }
  bool isSuccess() const override {
    return exception() == nullptr && end_.query();
  }
  std::exception_ptr exception() const override {
    const std::lock_guard<std::mutex> lock(outcome_->mutex);
    return seen_;
  }
  Tensors result() override {
    return outputs_;
  }
  void synchronize() override {
    end_.block(current_stream(end_.device_index()));
    stash_.clear();
  }
  bool wait(Milliseconds timeout) override {
    if (timeout > kNoTimeout) {
      TORCH_CHECK_WITH(DistBackendError, marker_->wait(timeout), "the double timed out after ", timeout.count(), " ms");
    }
    if (const auto failure = exception()) {
      std::rethrow_exception(failure);
    }
    synchronize();
    if (blocks_) {
      queue_of(current_stream(end_.device_index())).drain();
    }
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  const Tensors outputs_;
  Tensors stash_; // kept until the current stream comes after
  const std::shared_ptr<Outcome> outcome_;
  std::exception_ptr seen_; // guarded by the outcome's mutex
  const bool blocks_;
  c10::Event end_;
  MarkerPtr marker_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// --- the backend ---

// Work of a stream: it starts operations of Gloo, waits for them, and finishes.
struct Task {
  std::function<Works(const BackendPtr&)> start;
  std::function<void()> finish = [] {};
};

struct Operation {
  c10d::OpType type;
  Call call;
  Tensors inputs;
  Tensors outputs;
  bool async = true;
  Task task;
};

Tensors on_host(const Tensors& tensors) {
  Tensors all;
  for (const auto& tensor : tensors) {
    all.push_back(device_double::on_host(tensor));
  }
  return all;
}

Tensors concat(const Tensors& first, const Tensors& second) {
  Tensors all = first;
  all.insert(all.end(), second.begin(), second.end());
  return all;
}

Lists on_host(const Lists& lists) {
  Lists all;
  for (const auto& list : lists) {
    all.push_back(on_host(list));
  }
  return all;
}

Tensors flat(const Lists& lists) {
  Tensors all;
  for (const auto& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

class RecordingDelegate : public c10d::Backend {
 public:
  // Makes the backend that communicates with the `size` ranks that meet at `store`; it may block until all have come.
  using Maker = std::function<BackendPtr(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout)>;

  RecordingDelegate(
      Maker maker,
      c10::intrusive_ptr<c10d::Store> store,
      int rank,
      int size,
      c10::intrusive_ptr<c10d::Backend::Options> options,
      at::Device device)
      : c10d::Backend(rank, size),
        maker_(std::move(maker)),
        store_(std::move(store)),
        options_(std::move(options)),
        device_(device),
        stream_(c10::impl::VirtualGuardImpl(kDevice).getStreamFromGlobalPool(device)) {}

  const std::string getBackendName() const override {
    return "recording";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  bool supportsCoalescing() const override {
    return true;
  }
#ifdef C10D_BACKEND_HAS_WINDOW
  bool isInitialized() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return communicators_.count("") > 0;
  }
#endif

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return move(
        "broadcast", c10d::OpType::BROADCAST, {tensors}, {tensors}, options, {{"root", options.rootRank}},
        [](c10d::Backend& gloo, Lists& in, Lists&, const auto& given) { return Works{gloo.broadcast(in[0], given)}; });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduce_each("allreduce", c10d::OpType::ALLREDUCE, lists_of_one(tensors), tensors, options, {});
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return reduce_each("allreduce_coalesced", c10d::OpType::COALESCED, lists_of_one(tensors), tensors, options, {});
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const bool is_root = rank_ == options.rootRank;
    return reduce_each(
        "reduce", c10d::OpType::REDUCE, lists_of_one(tensors), is_root ? tensors : Tensors(), options, {{"root", options.rootRank}});
  }
  WorkPtr allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return move(
        "allgather", c10d::OpType::ALLGATHER, {inputs}, outputs, options, {},
        [](c10d::Backend& gloo, Lists& in, Lists& out, const auto& given) { return Works{gloo.allgather(out, in[0], given)}; });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return gather_each("_allgather_base", c10d::OpType::_ALLGATHER_BASE, {output}, {input}, options);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return gather_each("allgather_into_tensor_coalesced", c10d::OpType::COALESCED, outputs, inputs, options);
  }
  WorkPtr allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    record(describe("allgather_coalesced", inputs, options)); // NCCL has none
    return c10d::Backend::allgather_coalesced(outputs, inputs, options);
  }
  WorkPtr gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return move(
        "gather", c10d::OpType::GATHER, {inputs}, outputs, options, {{"root", options.rootRank}},
        [](c10d::Backend& gloo, Lists& in, Lists& out, const auto& given) { return Works{gloo.gather(out, in[0], given)}; });
  }
#ifdef C10D_BACKEND_HAS_WINDOW
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& options) override {
    Tensors inputs = {input};
    Lists outputs;
    if (rank_ == options.rootRank) {
      outputs = {output.chunk(size_)};
    }
    return gather(outputs, inputs, options);
  }
#endif
  WorkPtr scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    return move(
        "scatter", c10d::OpType::SCATTER, inputs, {outputs}, options, {{"root", options.rootRank}},
        [](c10d::Backend& gloo, Lists& in, Lists& out, const auto& given) { return Works{gloo.scatter(out[0], in, given)}; });
  }
  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    return reduce_each("reduce_scatter", c10d::OpType::REDUCE_SCATTER, inputs, outputs, options, {});
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return reduce_each("_reduce_scatter_base", c10d::OpType::_REDUCE_SCATTER_BASE, {input.chunk(size_)}, {output}, options, {});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    Lists lists;
    for (const auto& input : inputs) {
      lists.push_back(input.chunk(size_));
    }
    return reduce_each("reduce_scatter_tensor_coalesced", c10d::OpType::COALESCED, lists, outputs, options, {});
  }
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    return move(
        "alltoall_base", c10d::OpType::ALLTOALL_BASE, {{input}}, {{output}}, options,
        {{"output_splits", output_splits}, {"input_splits", input_splits}},
        [output_splits, input_splits](c10d::Backend& gloo, Lists& in, Lists& out, const auto& given) mutable {
          return Works{gloo.alltoall_base(out[0][0], in[0][0], output_splits, input_splits, given)};
        });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return move(
        "alltoall", c10d::OpType::ALLTOALL, {inputs}, {outputs}, options, {},
        [rank = rank_](c10d::Backend& gloo, Lists& in, Lists& out, const auto&) { // Gloo has none
          Works works;
          for (c10d::ScatterOptions given; given.rootRank < static_cast<int>(out[0].size()); ++given.rootRank) {
            Tensors part = {out[0][given.rootRank]};
            Lists parts = given.rootRank == rank ? in : Lists();
            works.push_back(gloo.scatter(part, parts, given));
          }
          return works;
        });
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return message("send", c10d::OpType::SEND, tensors, peer, tag);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return message("recv", c10d::OpType::RECV, tensors, peer, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    record({"recvAnysource", {}, {{"tag", int64_t{tag}}}, {}}); // NCCL has none
    return c10d::Backend::recvAnysource(tensors, tag);
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto call = describe("barrier", {}, options);
    call.options["device_ids"] = options.device_ids;
    call.options["device"] = options.device ? options.device->str() : std::string();
    return run({c10d::OpType::BARRIER, std::move(call), {}, {}, options.asyncOp, {[](const BackendPtr& gloo) {
                  return Works{gloo->barrier()};
                }}});
  }

  void startCoalescing() override {
    TORCH_CHECK(!group_, "startCoalescing: a group has been started already");
    group_.emplace();
  }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(group_, "endCoalescing: no group was started");
    std::exception_ptr failure;
    try {
      if (!group_->empty()) {
        communicator("", rank_, size_); // as in NCCL, the group is open while it connects
      }
    } catch (...) {
      failure = std::current_exception();
    }
    auto parts = std::move(*group_);
    group_.reset();
    if (failure) {
      std::rethrow_exception(failure);
    }
    if (parts.empty()) {
      return nullptr; // as in NCCL
    }
    Operation whole{c10d::OpType::COALESCED, {"coalesced", {}, {}, {}}, {}, {}, false, {}};
    std::vector<Task> tasks;
    for (auto& part : parts) {
      whole.call.parts.push_back(std::move(part.call));
      whole.inputs.insert(whole.inputs.end(), part.inputs.begin(), part.inputs.end());
      whole.outputs.insert(whole.outputs.end(), part.outputs.begin(), part.outputs.end());
      whole.async = whole.async || part.async;
      tasks.push_back(std::move(part.task));
    }
    whole.task.start = [tasks](const BackendPtr& gloo) {
      Works works;
      for (const auto& task : tasks) {
        for (auto& work : task.start(gloo)) {
          works.push_back(std::move(work));
        }
      }
      return works;
    };
    whole.task.finish = [tasks] {
      for (const auto& task : tasks) {
        task.finish();
      }
    };
    return run(std::move(whole));
  }

  void setTimeout(Milliseconds timeout) override {
    record({"set_timeout", {}, {{"timeout", int64_t{timeout.count()}}}, {}});
    options_->timeout = timeout;
  }
  void setSequenceNumberForGroup() override {
    record({"set_sequence_number", {}, {}, {}});
  }
  uint64_t getSequenceNumberForGroup() override {
    return sequence_;
  }
  void eagerConnectSingleDevice(at::Device device) override {
    record({"eager_connect", {}, {{"device", device.str()}}, {}});
    communicator("", rank_, size_);
  }
  std::shared_ptr<c10::Allocator> getMemAllocator() override {
    record({"mem_allocator", {}, {}, {}});
    return {std::shared_ptr<c10::Allocator>(), c10::GetAllocator(kDevice)};
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    record({"allocate_tensor", {}, {{"size", int64_t{size}}, {"device", options.device().str()}}, {}});
    return at::empty({size}, options);
  }
  bool supportsTensorAlloc(c10::DeviceIndex /*device*/) override {
    return true;
  }
  void enableCollectivesTiming() override {
    record({"enable_timing", {}, {}, {}});
  }
  void abort() override {
    record({"abort", {}, {}, {}});
    for (const auto& [name, communicator] : close()) {
      communicator.gloo->abort();
    }
  }
  void shutdown() override {
    record({"shutdown", {}, {}, {}});
    close();
  }

  // For tests.
  py::list calls() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    py::list all;
    for (const auto& call : calls_) {
      all.append(to_python(call));
    }
    return all;
  }
  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_.clear();
  }
  // The next operation throws: from its call, or on the device.
  void fail_next(std::string message, bool at_once) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure_ = {{std::move(message), at_once}};
  }
  // The communicators that have been connected: "" is the whole group, "0:2" a pair of ranks.
  std::vector<std::string> connected() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::string> names;
    for (const auto& [name, communicator] : communicators_) {
      names.push_back(name);
    }
    return names;
  }
  c10::Stream stream() const {
    return stream_;
  }
  c10::intrusive_ptr<Options> options() const {
    return options_;
  }

 private:
  struct Communicator {
    BackendPtr gloo;
    c10::Stream stream;
  };

  // Like ncclCommInitRank at a first operation, it blocks until all ranks of the communicator have come.
  Communicator communicator(const std::string& name, int rank, int size) {
    const std::lock_guard<std::mutex> making(making_);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK_WITH(DistBackendError, !closed_, "the double was aborted or shut down");
      if (const auto found = communicators_.find(name); found != communicators_.end()) {
        return found->second;
      }
    }
    auto gloo = maker_(c10::make_intrusive<c10d::PrefixStore>("pair " + name, store_), rank, size, options_->timeout);
    const auto stream = name.empty() ? stream_ : c10::impl::VirtualGuardImpl(kDevice).getStreamFromGlobalPool(device_);
    const std::lock_guard<std::mutex> lock(mutex_);
    return communicators_.emplace(name, Communicator{std::move(gloo), stream}).first->second;
  }

  template <typename C10dOptions>
  Call describe(const char* name, const Tensors& tensors, const C10dOptions& options) {
    auto call = describe(name, tensors);
    call.options["timeout"] = int64_t{options.timeout.count()};
    call.options["async"] = options.asyncOp;
    return call;
  }
  Call describe(const char* name, const Tensors& tensors) {
    Call call{name, {}, {}, {}};
    for (const auto& tensor : tensors) {
      // The text of NCCL's error.
      TORCH_CHECK_WITH(ValueError, tensor.defined() && tensor.device().type() == kDevice, "Tensors must be on the double and dense");
      TORCH_CHECK_WITH(ValueError, tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
      call.tensors.push_back({tensor.sizes().vec(), tensor.scalar_type(), tensor.device().str()});
    }
    return call;
  }
  template <typename C10dOptions>
  static C10dOptions async(C10dOptions options) {
    options.asyncOp = true; // the stream waits for Gloo's own Work
    return options;
  }
  void record(Call call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_.push_back(std::move(call));
  }
  static Lists lists_of_one(const Tensors& tensors) {
    Lists lists;
    for (const auto& tensor : tensors) {
      lists.push_back({tensor});
    }
    return lists;
  }

  // Runs an operation of Gloo, which `start` calls with views of the tensors on the host.
  template <typename C10dOptions, typename Start>
  WorkPtr move(
      const char* name,
      c10d::OpType type,
      const Lists& inputs,
      const Lists& outputs,
      const C10dOptions& options,
      Values more,
      Start start) {
    auto call = describe(name, concat(flat(inputs), flat(outputs)), options);
    call.options.merge(more);
    return run(
        {type,
         std::move(call),
         flat(inputs),
         flat(outputs),
         options.asyncOp,
         {[in = on_host(inputs), out = on_host(outputs), given = async(options), start](const BackendPtr& gloo) mutable {
           return start(*gloo, in, out, given);
         }}});
  }
  WorkPtr gather_each(
      const char* name, c10d::OpType type, const Tensors& outputs, const Tensors& inputs, const c10d::AllgatherOptions& options) {
    return move(name, type, {inputs}, {outputs}, options, {}, [](c10d::Backend& gloo, Lists& in, Lists& out, const auto& given) {
      Works works;
      for (size_t i = 0; i < in[0].size(); ++i) {
        works.push_back(gloo._allgather_base(out[0][i], in[0][i], given));
      }
      return works;
    });
  }
  // Every reduction sums copies on all ranks. An output gets its list's only sum, or the one of this rank's number.
  template <typename C10dOptions>
  WorkPtr reduce_each(
      const char* name, c10d::OpType type, const Lists& inputs, const Tensors& outputs, const C10dOptions& options, Values more) {
    auto call = describe(name, concat(flat(inputs), outputs), options);
    call.options.merge(more);
    call.options["op"] = name_of(options.reduceOp);
    const bool is_mean = options.reduceOp == c10d::ReduceOp::AVG; // which Gloo has not
    c10d::AllreduceOptions given;
    given.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : options.reduceOp;
    given.timeout = options.timeout;
    auto sums = std::make_shared<Lists>();
    return run(
        {type,
         std::move(call),
         flat(inputs),
         outputs,
         options.asyncOp,
         {[=, in = on_host(inputs)](const BackendPtr& gloo) {
            Works works;
            for (const auto& list : in) {
              auto& copies = sums->emplace_back();
              for (const auto& input : list) {
                Tensors one = {copies.emplace_back(input.clone())};
                works.push_back(gloo->allreduce(one, given));
              }
            }
            return works;
          },
          [=, out = on_host(outputs), rank = rank_, size = size_] {
            for (size_t i = 0; i < out.size(); ++i) {
              const auto& sum = (*sums)[i].size() == 1 ? (*sums)[i][0] : (*sums)[i][rank];
              out[i].view({-1}).copy_(is_mean ? sum.view({-1}) / size : sum.view({-1}));
            }
          }}});
  }
  // As in NCCL, a single message uses a communicator of the two ranks, and one in a coalesced group that of the group.
  WorkPtr message(const char* name, c10d::OpType type, Tensors& tensors, int peer, int tag) {
    auto call = describe(name, tensors);
    call.options["peer"] = int64_t{peer};
    call.options["tag"] = int64_t{tag};
    const bool is_send = type == c10d::OpType::SEND;
    const bool alone = !group_;
    if (!alone && peer == rank_) { // as in NCCL, only in a group; Gloo has no such messages
      Task task = {[=, own = to_itself_, host = device_double::on_host(tensors.at(0))](const BackendPtr&) {
        if (is_send) {
          own->push_back(host);
        }
        return Works();
      }};
      if (!is_send) {
        task.finish = [own = to_itself_, host = device_double::on_host(tensors.at(0))] {
          host.copy_(own->at(0));
          own->erase(own->begin());
        };
      }
      return run({type, std::move(call), tensors, is_send ? Tensors() : tensors, true, std::move(task)});
    }
    const int there = alone ? (peer < rank_ ? 0 : 1) : peer;
    Operation operation{
        type,
        std::move(call),
        tensors,
        is_send ? Tensors() : tensors,
        true,
        {[=, host = on_host(tensors)](const BackendPtr& gloo) mutable {
          return Works{is_send ? gloo->send(host, there, 0) : gloo->recv(host, there, 0)};
        }}};
    if (!alone) {
      return run(std::move(operation));
    }
    TORCH_CHECK_WITH(ValueError, peer >= 0 && peer < size_ && peer != rank_, "Invalid peer rank ", peer);
    const auto pair = std::to_string(std::min(rank_, peer)) + ":" + std::to_string(std::max(rank_, peer));
    return run(std::move(operation), pair, rank_ < peer ? 0 : 1, 2);
  }

  WorkPtr run(Operation operation) {
    return run(std::move(operation), "", rank_, size_);
  }
  WorkPtr run(Operation operation, const std::string& name, int rank, int size) {
    if (group_) {
      group_->push_back(std::move(operation));
      return nullptr;
    }
    record(operation.call);
    std::optional<std::pair<std::string, bool>> failure;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      failure = std::exchange(failure_, std::nullopt);
    }
    TORCH_CHECK_WITH(DistBackendError, !(failure && failure->second), failure->first);
    const auto [gloo, own_stream] = communicator(name, rank, size);
    ++sequence_;
    // As in NCCL, an operation for which the program waits at once runs on the program's own stream.
    const auto now = current_stream(device_.index());
    const auto stream = operation.async ? own_stream : now;
    if (operation.async) {
      c10::Event ready(kDevice);
      ready.record(now);
      ready.block(stream);
    }
    auto outcome = std::make_shared<Outcome>();
    queue_of(stream).enqueue([gloo = gloo, task = std::move(operation.task), outcome, failure] {
      try {
        TORCH_CHECK_WITH(DistBackendError, !failure, failure->first);
        for (const auto& work : task.start(gloo)) {
          work->wait();
        }
        task.finish();
      } catch (...) {
        const std::lock_guard<std::mutex> lock(outcome->mutex);
        outcome->failure = std::current_exception();
      }
    });
    const c10::StreamGuard guard(stream);
    auto stash = operation.async ? concat(operation.inputs, operation.outputs) : Tensors();
    return c10::make_intrusive<DelegateWork>(
        rank_, operation.type, operation.inputs, operation.outputs, std::move(stash), std::move(outcome),
        operation.type == c10d::OpType::BARRIER);
  }

  std::map<std::string, Communicator> close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    return std::exchange(communicators_, {});
  }

  const Maker maker_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<Options> options_;
  const at::Device device_;
  const c10::Stream stream_;
  std::mutex making_;
  mutable std::mutex mutex_;
  std::map<std::string, Communicator> communicators_;
  std::vector<Call> calls_;
  std::optional<std::pair<std::string, bool>> failure_;
  std::optional<std::vector<Operation>> group_;
  const std::shared_ptr<Tensors> to_itself_ = std::make_shared<Tensors>(); // messages, in their order
  std::atomic<uint64_t> sequence_{0};
  bool closed_ = false;
};

} // namespace

void bind_delegate(py::module_& module) {
  py::module_::import("torch._C._distributed_c10d"); // registers the base classes
  py::class_<DelegateWork, c10d::Work, c10::intrusive_ptr<DelegateWork>>(module, "DelegateWork");
  py::class_<RecordingDelegate, c10d::Backend, c10::intrusive_ptr<RecordingDelegate>>(module, "RecordingDelegate")
      .def(
          py::init([](py::function make, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                      const c10::intrusive_ptr<c10d::Backend::Options>& options, const at::Device& device) {
            // Never destroyed: the delegate may outlive the interpreter.
            auto* function = new py::function(std::move(make));
            RecordingDelegate::Maker maker =
                [function](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout) {
                  const py::gil_scoped_acquire gil;
                  return (*function)(store, rank, size, timeout).cast<BackendPtr>();
                };
            return c10::make_intrusive<RecordingDelegate>(std::move(maker), store, rank, size, options, device);
          }))
      .def_property_readonly("calls", &RecordingDelegate::calls)
      .def("clear", &RecordingDelegate::clear)
      .def("fail_next", &RecordingDelegate::fail_next, py::arg("message"), py::arg("at_once") = false)
      .def_property_readonly("connected", &RecordingDelegate::connected)
      .def_property_readonly("stream", &RecordingDelegate::stream)
      .def_property_readonly("options", &RecordingDelegate::options)
      .def_property_readonly("group_uid", &RecordingDelegate::getGroupUid)
      .def_property_readonly("group_desc", &RecordingDelegate::getGroupDesc)
      .def_property_readonly("bound_device", &RecordingDelegate::getBoundDeviceId);
}

} // namespace device_double
