#include "transport/mpi/remote_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include "core/deadline.hpp"
#include "core/failure.hpp"
#include "core/settings.hpp"
#include "job/timed_call.hpp"
#include "transport/mpi/rma_probe.hpp"
#include "transport/shared_memory/arena.hpp"
#include "transport/transport.hpp"

namespace fog::mpi {
namespace {

constexpr size_t kLine = 64;
// Returns memory that local peers can map as well, if the system supports it.
char* pool_of(size_t bytes) {
  if (auto* arena = shared_memory::Arena::instance()) {
    if (auto* memory = arena->allocate(bytes)) {
      return static_cast<char*>(memory);
    }
  }
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, memory != MAP_FAILED, "fog: no memory for the pool of FOG_RMA_BYTES=", bytes, " bytes");
  return static_cast<char*>(memory);
}

} // namespace

std::unique_ptr<RemoteMemory> RemoteMemory::open(
    Runtime& runtime, Rendezvous& rendezvous, Watchdog& watchdog, std::chrono::milliseconds timeout) {
  const bool is_wanted = settings().between_hosts == "rma";
  const auto& nodes = runtime.nodes();
  const size_t bytes = settings().rma_bytes;
  if (rendezvous.size() != runtime.size() || rendezvous.rank() != runtime.rank()) {
    TORCH_CHECK_WITH(
        DistBackendError, !is_wanted,
        "fog: FOG_BETWEEN_HOSTS=rma needs a first group of all ranks of MPI's world, in their order: it has ", rendezvous.size(),
        " of ", runtime.size(), " ranks, this process is rank ", rendezvous.rank(), " of the group and rank ", runtime.rank(),
        " of the world");
    return nullptr;
  }
  if (std::all_of(nodes.begin(), nodes.end(), [&](int node) { return node == nodes[0]; })) {
    return nullptr;
  }
  std::unique_ptr<RemoteMemory> made(new RemoteMemory(runtime, watchdog, pool_of(bytes), bytes));
  Answer answer;
  answer.fault = rendezvous.first_failure("rma-window", [&] { made->create(timeout); });
  if (answer.fault.empty()) {
    answer = probe(runtime, rendezvous, made->window_, made->memory_, timeout);
  }
  const auto& fault = answer.fault;
  TORCH_CHECK_WITH(
      DistBackendError, fault.empty() || !is_wanted, "fog: FOG_BETWEEN_HOSTS=rma is not available here: ", fault,
      ". With 'auto' or 'tcp' data goes by TCP.");
  if (runtime.rank() == 0) {
    const std::string rma = answer.alone ? "RMA" : "RMA, of windows by TCP: a put waits until its target calls MPI";
    LOG(INFO) << "fog: between hosts data goes by " << (fault.empty() ? rma : "TCP: " + fault);
  }
  if (!fault.empty()) {
    static_cast<void>(made.release()); // MPI's window refers to it as long as MPI runs
    return nullptr;
  }
  made->completes_alone_ = answer.alone;
  return made;
}

RemoteMemory::RemoteMemory(Runtime& runtime, Watchdog& watchdog, char* memory, size_t bytes)
    : watchdog_(watchdog), runtime_(runtime), memory_(memory), bytes_(bytes), free_bytes_(bytes) {
  free_.emplace(0, free_bytes_);
}

void RemoteMemory::create(std::chrono::milliseconds timeout) {
  const auto deadline = deadline_after(timeout);
  auto window = std::make_shared<MPI_Win>(MPI_WIN_NULL);
  auto code = std::make_shared<int>(MPI_SUCCESS);
  call_in_time("MPI_Win_create", deadline, timeout, nullptr, nullptr, [this, window, code] {
    *code = api().Win_create(memory_, static_cast<MPI_Aint>(bytes_), 1, MPI_INFO_NULL, runtime_.communicator(), window.get());
    return MPI_SUCCESS;
  });
  TORCH_CHECK_WITH(
      DistBackendError, *code == MPI_SUCCESS, "MPI_Win_create of ", library_path(), " failed on rank ", runtime_.rank(), ": ",
      error_text(*code));
  window_ = *window;
  check(api().Win_set_errhandler(window_, MPI_ERRORS_RETURN), "MPI_Win_set_errhandler");
  call_in_time(
      "MPI_Win_lock_all", deadline, timeout, nullptr, nullptr, [window] { return api().Win_lock_all(MPI_MODE_NOCHECK, *window); });
}

// --- the pool ---

void* RemoteMemory::allocate(size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t alignment = bytes >= page ? page : kLine;
  const size_t size = (std::max<size_t>(bytes, 1) + kLine - 1) / kLine * kLine;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto stretch = free_.begin(); stretch != free_.end(); ++stretch) {
    const auto [begin, length] = *stretch;
    const size_t at = (begin + alignment - 1) / alignment * alignment;
    if (at + size > begin + length) {
      continue;
    }
    free_.erase(stretch);
    if (at > begin) {
      free_.emplace(begin, at - begin);
    }
    if (begin + length > at + size) {
      free_.emplace(at + size, begin + length - at - size);
    }
    sizes_.emplace(at, size);
    free_bytes_ -= size;
    return memory_ + at;
  }
  return nullptr;
}

void RemoteMemory::free(void* memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sizes_.find(static_cast<size_t>(static_cast<char*>(memory) - memory_));
  TORCH_INTERNAL_ASSERT(found != sizes_.end(), "fog: memory was given back that is not of the pool for RMA");
  auto [begin, size] = *found;
  sizes_.erase(found);
  free_bytes_ += size;
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == begin + size) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      before->second += size;
      return;
    }
  }
  free_.emplace(begin, size);
}

size_t RemoteMemory::free_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return free_bytes_;
}

std::optional<RemoteMemory::Address> RemoteMemory::address_of(const void* memory, size_t bytes) const {
  const auto* at = static_cast<const char*>(memory);
  if (at < memory_ || at + bytes > memory_ + bytes_) {
    return std::nullopt;
  }
  return static_cast<Address>(at - memory_);
}

// --- access to other processes ---

void RemoteMemory::check_reachable(PeerId peer) const {
  if (has_ended_(peer)) {
    throw Unreachable(peer);
  }
}

void RemoteMemory::answer() {
  int waiting = 0;
  const auto look = [&] { return api().Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, runtime_.communicator(), &waiting, MPI_STATUS_IGNORE); };
  check(watchdog_.call("MPI_Iprobe", -1, look), "MPI_Iprobe");
}

void RemoteMemory::put(PeerId peer, Address to, const void* data, size_t bytes) {
  check_reachable(peer);
  const auto count = static_cast<int>(bytes);
  const auto start = [&] {
    return api().Put(data, count, MPI_BYTE, mpi_rank(peer), static_cast<MPI_Aint>(to), count, MPI_BYTE, window_);
  };
  check(watchdog_.call("MPI_Put", peer, start), "MPI_Put");
}

void RemoteMemory::get(PeerId peer, Address from, void* data, size_t bytes) {
  check_reachable(peer);
  const auto count = static_cast<int>(bytes);
  const auto start = [&] {
    return api().Get(data, count, MPI_BYTE, mpi_rank(peer), static_cast<MPI_Aint>(from), count, MPI_BYTE, window_);
  };
  check(watchdog_.call("MPI_Get", peer, start), "MPI_Get");
}

void RemoteMemory::flush(PeerId peer) {
  check_reachable(peer);
  check(watchdog_.call("MPI_Win_flush", peer, [&] { return api().Win_flush(mpi_rank(peer), window_); }), "MPI_Win_flush");
}

} // namespace fog::mpi
