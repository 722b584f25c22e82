#include "backend/process_group_fog.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include <ATen/DeviceAccelerator.h>
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include "backend/c10d_window.hpp"
#include "device/pinned_staging.hpp"
#include "windows/window.hpp"
#include "engine/process_engine.hpp"
#include "job/mpi_runtime.hpp"

namespace fog {

using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

namespace {

// torch's newer classes for NCCL do not support timing; their operations should continue without it.
void enable_timing(c10d::Backend& delegate) {
  try {
    delegate.enableCollectivesTiming();
  } catch (const c10::Error& error) {
    TORCH_WARN_ONCE("fog: ", delegate.getBackendName(), " does not time its operations: ", error.what_without_backtrace());
  }
}

} // namespace

ProcessGroupFog::ProcessGroupFog(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<Options> options,
    const ProcessGroupFog* known,
    std::vector<int> known_ranks)
    : Backend(rank, size), options_(std::move(options)), device_backends_(make_device_backends(store, rank, size)) {
  init();
  // ProcessGroup::splitGroup() sets the names of backends that the new group already has; this one is added later.
  c10d::Backend::setGroupUid(options_->group_name);
  setGroupDesc(options_->group_desc);
  const auto& name = options_->group_name.empty() ? std::string("default") : options_->group_name;
  PriorGroup prior;
  if (known != nullptr) {
    TORCH_CHECK_VALUE(
        known_ranks.size() == static_cast<size_t>(size), "known_ranks: got ", known_ranks.size(), " ranks; allowed are ", size,
        ", one for each rank of this group");
    known->check_ranks("known_ranks", known_ranks, known->size_);
    prior = {known->group_, std::move(known_ranks)};
  }
  group_ = connect(store, rank, size, options_->timeout, name, prior);
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  if (options_->enable_reconfigure) {
    await_reconfiguration();
  }
#endif
}

ProcessGroupFog::ProcessGroupFog(
    std::shared_ptr<Group> group,
    c10::intrusive_ptr<Options> options,
    std::shared_ptr<void> engine_owner,
    const c10::intrusive_ptr<c10d::Store>& store)
    : Backend(group->rank, group->size()),
      options_(std::move(options)),
      device_backends_(make_device_backends(store, group->rank, group->size())),
      engine_owner_(std::move(engine_owner)),
      group_(std::move(group)) {
  init();
}

std::shared_ptr<DeviceBackends> ProcessGroupFog::make_device_backends(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size) {
  return std::make_shared<DeviceBackends>(
      store, rank, size, options_, [this](const auto& delegate, const auto& device) { prepare(delegate, device); });
}

void ProcessGroupFog::prepare(const BackendPtr& delegate, const at::Device& device) {
  if (!getGroupUid().empty()) {
    delegate->setGroupUid(getGroupUid());
  }
  if (!getGroupDesc().empty()) {
    delegate->setGroupDesc(getGroupDesc());
  }
  if (const auto bound = getBoundDeviceId(); bound && bound->type() == device.type()) {
    delegate->setBoundDeviceId(bound);
  }
  if (is_timing_) {
    enable_timing(*delegate);
  }
  // A delegate's operations in flight would wait for a lost rank until the timeout, with the program if it waits for the
  // device; after that, NCCL's watchdog ends the process.
  const auto lost = group_->engine.call_when_lost(group_, [backends = std::weak_ptr(device_backends_)](const std::string& which) {
    if (const auto alive = backends.lock()) {
      for (const auto& made : alive->close(which)) {
        report_unowned_failure("the abort of a device's backend", [&] { made->abort(); });
      }
    }
  });
  if (!lost.empty()) {
    device_backends_->close(lost); // so that this delegate takes no operation
  }
}

c10::intrusive_ptr<ProcessGroupFog> ProcessGroupFog::part(
    const std::vector<int>& ranks,
    uint64_t number,
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<Options>& options) const {
  // Of the whole world, a part may have ranks that came later.
  const auto& runtime = Runtime::instance();
  check_ranks("part: ranks", ranks, size_ < runtime.size() ? size_ : std::max(size_, runtime.max_ranks()));
  TORCH_CHECK_VALUE(
      std::count(ranks.begin(), ranks.end(), rank_) == 1, "part: ranks: got none of this rank, ", rank_, "; it must be one of them");
  auto group = group_->engine.add_part(*group_, number, options->group_name, ranks);
  auto made = c10::make_intrusive<ProcessGroupFog>(std::move(group), options, engine_owner_, store);
  made->c10d::Backend::setGroupUid(options->group_name);
  made->setGroupDesc(options->group_desc);
  return made;
}

void ProcessGroupFog::check_ranks(const char* argument, const std::vector<int>& ranks, int size) const {
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(
        rank >= 0 && rank < size, argument, ": got rank ", rank, "; allowed are ranks 0 to ", size - 1, " of this group of ", size_);
    TORCH_CHECK_VALUE(std::count(ranks.begin(), ranks.end(), rank) == 1, argument, ": got rank ", rank, " more than once");
  }
}

void ProcessGroupFog::watch(const std::vector<int>& ranks) const {
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "watch: ranks: got rank ", rank, "; allowed are ranks 0 to ", size_ - 1);
  }
  group_->engine.watch(*group_, ranks);
}

ProcessGroupFog::~ProcessGroupFog() {
  close();
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupFog::split(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  check_ranks("split: ranks", ranks, size_);
  auto child = child_options("split", options);
  child->global_ranks_in_group.clear();
  for (const int rank : ranks) {
    const auto& global = options_->global_ranks_in_group; // empty in the default group
    child->global_ranks_in_group.push_back(global.empty() ? static_cast<uint64_t>(rank) : global[rank]);
  }
  const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
  if (mine == ranks.end()) {
    return nullptr;
  }
  // ProcessGroup::splitGroup() calls this once for each type of device; the new group has one backend for all of them.
  if (!child->group_name.empty() && child->group_name == last_split_.first) {
    if (auto same = last_split_.second.lock()) {
      return same;
    }
  }
  last_split_.first = child->group_name;
  auto group = c10::make_intrusive<ProcessGroupFog>(
      store, static_cast<int>(mine - ranks.begin()), static_cast<int>(ranks.size()), child, this, ranks);
  last_split_.second = c10::weak_intrusive_ptr<c10d::Backend>(c10::intrusive_ptr<c10d::Backend>(group));
  return group;
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupFog::merge(
    const c10::intrusive_ptr<c10d::Store>& store,
    const c10::intrusive_ptr<c10d::Backend::Options>& options,
    const int& rank,
    const int& size) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < size, "merge: rank: got ", rank, "; allowed are ranks 0 to ", size - 1);
  auto child = child_options("merge", options);
  child->global_ranks_in_group.clear(); // this group's ranks say nothing about the new group
  return c10::make_intrusive<ProcessGroupFog>(store, rank, size, std::move(child));
}

c10::intrusive_ptr<ProcessGroupFog::Options> ProcessGroupFog::child_options(
    const char* op, const c10::intrusive_ptr<c10d::Backend::Options>& options) const {
  const auto* given = dynamic_cast<const Options*>(options.get());
  TORCH_CHECK_TYPE(
      given != nullptr, op, ": options: got ", options ? "those of backend " + options->backend : std::string("none"),
      "; allowed are ProcessGroupFog.Options");
  auto child = c10::make_intrusive<Options>(*given); // a copy, because the caller may use the options for several groups
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  child->enable_reconfigure = false; // its ranks are given
#endif
  return child;
}

void ProcessGroupFog::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  for (const auto& delegate : device_backends_->made()) {
    delegate->setTimeout(timeout);
  }
}

void ProcessGroupFog::setGroupUid(const std::string& uid) {
  c10d::Backend::setGroupUid(uid);
  for (const auto& delegate : device_backends_->made()) {
    delegate->setGroupUid(uid);
  }
}

void ProcessGroupFog::enableCollectivesTiming() {
  is_timing_ = true; // fog's own operations are always timed
  for (const auto& delegate : device_backends_->made()) {
    enable_timing(*delegate);
  }
}

void ProcessGroupFog::eagerConnectSingleDevice(at::Device device) {
  if (!device.is_cpu()) {
    device_backends_->connect("eager_connect_single_device", device);
  }
}

at::Device ProcessGroupFog::accelerator(const char* op) const {
  if (const auto bound = getBoundDeviceId()) {
    return *bound;
  }
  const auto type = at::getAccelerator();
  TORCH_CHECK_VALUE(type, op, ": this torch knows no accelerator; allowed is a process with one");
  return {*type, at::accelerator::getDeviceIndex()};
}

std::shared_ptr<c10::Allocator> ProcessGroupFog::getMemAllocator() {
  const auto delegate = device_backends_->serving("mem_allocator", accelerator("mem_allocator"));
  TORCH_CHECK_VALUE(
      delegate, "mem_allocator: only fog serves this group's tensors; allowed is a group with a backend for an accelerator");
  return delegate->getMemAllocator();
}

at::Tensor ProcessGroupFog::allocateTensor(long size, at::TensorOptions options) {
  const auto delegate = device_backends_->serving("allocate_tensor", options.device());
  TORCH_CHECK_VALUE(
      delegate, "allocate_tensor: device: got ", options.device(), "; allowed is an accelerator, whose backend has memory of its own");
  return delegate->allocateTensor(size, options);
}

bool ProcessGroupFog::supportsTensorAlloc(c10::DeviceIndex index) {
  if (!getBoundDeviceId() && at::accelerator::deviceCount() == 0) { // also a torch for GPUs on a machine without one
    return false;
  }
  const auto delegate =
      device_backends_->serving("supports_tensor_alloc", at::Device(accelerator("supports_tensor_alloc").type(), index));
  return delegate && delegate->supportsTensorAlloc(index);
}

#ifdef C10D_BACKEND_HAS_HOOKS
void ProcessGroupFog::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  for (const auto& delegate : device_backends_->made()) {
    delegate->addEphemeralTimeout(timeout);
  }
}
#endif

void ProcessGroupFog::shutdown() {
  for (const auto& delegate : device_backends_->close()) {
    delegate->shutdown();
  }
  close();
}

void ProcessGroupFog::close() {
  group_->engine.close(group_);
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  if (world_ && world_ != group_) {
    world_->engine.close(world_);
  }
#endif
}

void ProcessGroupFog::abort() {
  for (const auto& delegate : device_backends_->close()) {
    delegate->abort();
  }
  group_->engine.abort(group_, c10::str("rank ", rank_, " aborted group '", group_->name, "'"));
}

c10d::ErrorType ProcessGroupFog::getError() {
  for (const auto& delegate : device_backends_->made()) {
    if (const auto error = delegate->getError(); error != c10d::ErrorType::SUCCESS) {
      return error;
    }
  }
  return group_->engine.failure(group_).type;
}

uint64_t ProcessGroupFog::getSequenceNumberForGroup() {
  return group_->engine.sequence(group_);
}

std::shared_ptr<Window> ProcessGroupFog::create_window(
    const at::Tensor& tensor,
    const std::string& name,
    std::vector<int> in_neighbors,
    std::vector<int> out_neighbors,
    bool zero_init,
    std::optional<std::chrono::milliseconds> timeout) {
  CallOptions options;
  options.name = "Window";
  options.timeout = timeout;
  options.waits = true;
  const auto gather = [&](const std::string& mine) {
    const auto bytes = at::empty({static_cast<int64_t>(mine.size())}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), mine.data(), mine.size());
    const auto work = allgather_concat(bytes, options);
    work->wait();
    const auto all = work->result().at(0);
    return std::string(static_cast<const char*>(all.const_data_ptr()), static_cast<size_t>(all.numel()));
  };
  WindowConfig config{group_, tensor, name, std::move(in_neighbors), std::move(out_neighbors), zero_init, options_->timeout};
  Window::StagingFactory make_staging;
  if (tensor.defined() && !tensor.device().is_cpu()) {
    make_staging = [](Window& window) { return std::make_unique<device::PinnedStaging>(window); };
  }
  return Window::create(std::move(config), gather, make_staging);
}

#ifdef C10D_BACKEND_HAS_WINDOW
c10::intrusive_ptr<c10d::Window> ProcessGroupFog::new_window(const std::optional<at::Tensor>& tensor) {
  const auto self = c10::intrusive_ptr<ProcessGroupFog>::reclaim_copy(this); // a tensor may be registered later
  auto window = c10::make_intrusive<C10dWindow>(
      [self](const at::Tensor& registered) {
        std::vector<int> others(self->size_);
        std::iota(others.begin(), others.end(), 0);
        others.erase(others.begin() + self->rank_);
        return self->create_window(registered, "c10d", others, others, true, std::nullopt);
      },
      rank_);
  if (tensor) {
    window->tensor_register(*tensor);
  }
  return window;
}
#endif

std::vector<int> ProcessGroupFog::hosts() const {
  std::vector<int> hosts;
  for (const auto& member : group_->members) {
    hosts.push_back(member.host);
  }
  return hosts;
}

std::vector<int> ProcessGroupFog::world_ranks() const {
  std::vector<int> ranks;
  for (const auto& member : group_->members) {
    ranks.push_back(member.peer_id);
  }
  return ranks;
}

std::string ProcessGroupFog::transport(int rank) const {
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < getSize() && rank != getRank(), "transport: rank: got ", rank, "; allowed are ranks 0 to ", getSize() - 1,
      " of this group except ", getRank(), ", which is this rank");
  return group_->engine.way_to(group_, rank);
}

void ProcessGroupFog::set_lost_after(double seconds) {
  constexpr double kMost = 1e6;
  TORCH_CHECK_VALUE(
      seconds == 0 || (seconds >= 1 && seconds <= kMost), "lost_after: got ", seconds,
      "; allowed are 0, for never, and seconds from 1 to 1000000");
  group_->engine.set_lost_after(std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9)));
}

std::vector<int> ProcessGroupFog::local_ranks() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (group_->members[rank].host == group_->members[rank_].host) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

ProcessGroupFog::CallOptions ProcessGroupFog::call_options(std::chrono::milliseconds timeout) const {
  CallOptions options;
  if (timeout > kNoTimeout) { // kUnsetTimeout is negative
    options.timeout = timeout;
  }
  return options;
}

WorkPtr ProcessGroupFog::submit(const std::shared_ptr<Operation>& operation, Call call, const CallOptions& options) {
  auto& engine = group_->engine;
  for (const auto& tensor : call.inputs) {
    operation->keep(tensor);
  }
  for (const auto& tensor : call.outputs) {
    operation->keep(tensor);
  }
  auto work = c10::make_intrusive<WorkFog>(engine, rank_, call.type, call.title, call.inputs, std::move(call.outputs));
  operation->set_confirm(options.confirm.value_or(options_->confirm));
  operation->set_patient(options.timeout && *options.timeout > options_->timeout);
  operation->set_work(work);
  const std::weak_ptr<Operation> weak = operation;
  work->set_describe([&engine, weak] {
    const auto alive = weak.lock();
    return alive ? engine.describe(alive) : std::string("operation that has ended");
  });
  engine.submit(group_, operation, options.timeout.value_or(options_->timeout), options.name, options.waits && !coalescing_);
  if (coalescing_) {
    coalesced_.push_back(work);
  }
  return work;
}

WorkPtr ProcessGroupFog::when_all(OpType type, std::vector<WorkPtr> works, std::optional<std::vector<at::Tensor>> outputs) {
  std::vector<c10::intrusive_ptr<WorkFog>> parts;
  parts.reserve(works.size());
  for (auto& work : works) {
    parts.push_back(c10::static_intrusive_pointer_cast<WorkFog>(work));
  }
  return WorkFog::when_all(group_->engine, rank_, type, std::move(parts), std::move(outputs));
}

WorkPtr ProcessGroupFog::then(
    c10::function_ref<WorkPtr()> start, Call call, const char* op, std::function<void(const Tensors& results)> finish) {
  // the caller's coalesced group should contain the whole operation, not its parts
  const bool coalescing = std::exchange(coalescing_, false);
  const auto before = start();
  coalescing_ = coalescing;
  auto work = c10::make_intrusive<WorkFog>(group_->engine, rank_, call.type, call.title, call.inputs, std::move(call.outputs));
  work->set_sequence(before->getSequencenumber());
  work->set_describe([op, name = group_->name] { return c10::str(op, " of group '", name, "'"); });
  before->getFuture()->addCallback([work, finish = std::move(finish)](c10::ivalue::Future& future) {
    std::exception_ptr error = future.hasError() ? future.exception_ptr() : nullptr;
    if (!error) {
      try {
        finish(future.constValue().toTensorVector());
      } catch (...) {
        error = std::current_exception();
      }
    }
    work->complete(error);
  });
  if (coalescing_) {
    coalesced_.push_back(work);
  }
  return work;
}

void ProcessGroupFog::startCoalescing() {
  // Operations on CPU tensors start at once; coalescing only joins their Works.
  coalescing_ = true;
  coalesced_.clear();
  device_backends_->start_coalescing();
}

WorkPtr ProcessGroupFog::endCoalescing() {
  coalescing_ = false;
  if (auto work = device_backends_->end_coalescing()) {
    return work;
  }
  return when_all(OpType::COALESCED, std::exchange(coalesced_, {}));
}

void ProcessGroupFog::check_root(const char* op, int64_t root) const {
  TORCH_CHECK_VALUE(
      root >= 0 && root < size_, op, ": root: got rank ", root, "; allowed are ranks 0 to ", size_ - 1, " of this group of ", size_);
}

void ProcessGroupFog::check_peer(const char* op, int peer, int tag) const {
  TORCH_CHECK_VALUE(
      peer >= 0 && peer < size_, op, ": peer: got rank ", peer, "; allowed are ranks 0 to ", size_ - 1, " of this group of ", size_);
  TORCH_CHECK_VALUE(peer != rank_, op, ": peer: got this rank itself (", peer, ")");
  TORCH_CHECK_VALUE(tag >= 0, op, ": tag: got ", tag, "; allowed are 0 and more");
}

} // namespace fog
