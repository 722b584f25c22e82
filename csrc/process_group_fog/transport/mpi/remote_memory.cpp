#include "transport/mpi/remote_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>
#include <thread>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>

#include "core/deadline.hpp"
#include "core/failure.hpp"
#include "core/settings.hpp"
#include "job/timed_call.hpp"
#include "transport/shared_memory/arena.hpp"
#include "transport/transport.hpp"

namespace fog::mpi {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kLine = 64;
// The first bytes of the pool, which the probe writes to.
constexpr size_t kProbeBytes = 4096;
constexpr uint64_t kProbeWord = 0x666f672d70726f62; // "fog-prob"
// The time for which the probe's target stays outside of MPI. A put by the fabric takes microseconds, but the origin
// must first be scheduled on a core. If the user has asked for RMA the wait is longer, because the result may be an
// error.
constexpr auto kProbeTime = std::chrono::milliseconds(200);
constexpr auto kProbeTimeIfAsked = std::chrono::milliseconds(3000);

// Keys of the Store at which the origin and the target of the probe report.
constexpr const char* kOutside = "rma-target-outside-mpi";
constexpr const char* kPut = "rma-put-done";
constexpr const char* kSeen = "rma-put-seen";
// Prefix of each text, because some stores reject an empty value.
constexpr const char* kText = "=";

// Returns false at the limit.
bool await(Rendezvous& rendezvous, const char* key, Deadline limit) {
  while (!rendezvous.has(key)) {
    if (Clock::now() >= limit) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

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

// Returns the lowest rank that is on another node than rank 0.
int first_elsewhere(const std::vector<int>& nodes) {
  return static_cast<int>(std::find_if(nodes.begin(), nodes.end(), [&](int node) { return node != nodes[0]; }) - nodes.begin());
}

} // namespace

std::unique_ptr<RemoteMemory> RemoteMemory::open(
    Runtime& runtime, Rendezvous& rendezvous, Watchdog& watchdog, std::chrono::milliseconds timeout) {
  const auto wanted = between_hosts();
  const auto& nodes = runtime.nodes();
  const size_t bytes = settings().rma_bytes;
  if (rendezvous.size() != runtime.size() || rendezvous.rank() != runtime.rank()) {
    TORCH_CHECK_WITH(
        DistBackendError, wanted != BetweenHosts::kRma,
        "fog: FOG_BETWEEN_HOSTS=rma (or the option between_hosts) needs a first group of all ranks of MPI's world, in their order: it has ",
        rendezvous.size(), " of ", runtime.size(), " ranks, this process is rank ", rendezvous.rank(), " of the group and rank ",
        runtime.rank(), " of the world");
    return nullptr;
  }
  if (first_elsewhere(nodes) == static_cast<int>(nodes.size())) {
    return nullptr;
  }
  std::unique_ptr<RemoteMemory> made(new RemoteMemory(runtime, watchdog, pool_of(bytes), bytes));
  const auto no_window = made->create(timeout);
  const auto fault = made->probe(rendezvous, no_window, timeout);
  TORCH_CHECK_WITH(
      DistBackendError, !fault || wanted != BetweenHosts::kRma,
      "fog: FOG_BETWEEN_HOSTS=rma (or the option between_hosts) is not available here: ", *fault,
      ". With 'auto' or 'tcp' data goes by TCP.");
  if (runtime.rank() == 0) {
    LOG(INFO) << "fog: between hosts data goes by " << (fault ? "TCP: " + *fault : std::string("RMA"));
  }
  if (fault) {
    static_cast<void>(made.release()); // MPI's window refers to it as long as MPI runs
    return nullptr;
  }
  return made;
}

RemoteMemory::RemoteMemory(Runtime& runtime, Watchdog& watchdog, char* memory, size_t bytes)
    : watchdog_(watchdog), runtime_(runtime), memory_(memory), bytes_(bytes), free_bytes_(bytes - kProbeBytes) {
  free_.emplace(kProbeBytes, free_bytes_);
}

std::optional<std::string> RemoteMemory::create(std::chrono::milliseconds timeout) {
  const auto deadline = deadline_after(timeout);
  auto window = std::make_shared<MPI_Win>(MPI_WIN_NULL);
  auto code = std::make_shared<int>(MPI_SUCCESS);
  call_in_time("MPI_Win_create", deadline, timeout, nullptr, nullptr, [this, window, code] {
    *code = api().Win_create(memory_, static_cast<MPI_Aint>(bytes_), 1, MPI_INFO_NULL, runtime_.communicator(), window.get());
    return MPI_SUCCESS;
  });
  if (*code != MPI_SUCCESS) {
    return c10::str("MPI_Win_create of ", library_path(), " failed on rank ", runtime_.rank(), ": ", error_text(*code));
  }
  window_ = *window;
  check(api().Win_set_errhandler(window_, MPI_ERRORS_RETURN), "MPI_Win_set_errhandler");
  call_in_time(
      "MPI_Win_lock_all", deadline, timeout, nullptr, nullptr, [window] { return api().Win_lock_all(MPI_MODE_NOCHECK, *window); });
  return std::nullopt;
}

std::optional<std::string> RemoteMemory::probe(
    Rendezvous& rendezvous, const std::optional<std::string>& no_window, std::chrono::milliseconds timeout) {
  const int target = first_elsewhere(runtime_.nodes());
  if (no_window) { // the two ranks of the probe report it; their errors cover ranks where MPI has made the window
    TORCH_CHECK_WITH(DistBackendError, runtime_.rank() == 0 || runtime_.rank() == target, "fog: ", *no_window);
    rendezvous.set(runtime_.rank() == 0 ? kPut : kOutside, kText + *no_window);
  } else if (runtime_.rank() == target) {
    probe_as_target(rendezvous, deadline_after(timeout));
  }
  for (const char* key : {kOutside, kPut, kSeen}) {
    rendezvous.discard(key);
  }
  const auto fault =
      rendezvous.from_rank_zero("rma", [&] { return kText + (no_window ? *no_window : probe_as_origin(rendezvous, target, timeout)); });
  return fault == kText ? std::nullopt : std::make_optional(fault.substr(std::strlen(kText)));
}

std::string RemoteMemory::probe_as_origin(Rendezvous& rendezvous, int target, std::chrono::milliseconds timeout) {
  const auto deadline = deadline_after(timeout);
  const auto missing = [&] {
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            "fog: MPI did not start within ", timeout.count(), " ms: rank ", target, " has not said whether a put by MPI reaches it"));
  };
  if (!await(rendezvous, kOutside, deadline)) {
    missing();
  }
  if (const auto no_window = rendezvous.get(kOutside); no_window != kText) {
    return no_window.substr(std::strlen(kText));
  }
  auto code = std::make_shared<int>(MPI_SUCCESS);
  call_in_time("MPI_Win_flush", deadline, timeout, nullptr, nullptr, [window = window_, target, code] {
    static const uint64_t word = kProbeWord;
    *code = api().Put(&word, sizeof(word), MPI_BYTE, target, 0, sizeof(word), MPI_BYTE, window);
    const int flushed = api().Win_flush(target, window);
    *code = *code == MPI_SUCCESS ? flushed : *code;
    return MPI_SUCCESS;
  });
  rendezvous.set(kPut, kText);
  if (!await(rendezvous, kSeen, deadline)) {
    missing();
  }
  return *code == MPI_SUCCESS ? rendezvous.get(kSeen).substr(std::strlen(kText)) : error_text(*code);
}

void RemoteMemory::probe_as_target(Rendezvous& rendezvous, Deadline deadline) {
  std::string fault;
  int* model = nullptr;
  int found = 0;
  check(api().Win_get_attr(window_, MPI_WIN_MODEL, &model, &found), "MPI_Win_get_attr");
  if (found == 0 || *model != MPI_WIN_UNIFIED) {
    fault = "this MPI keeps a copy of a window's memory (its model is not MPI_WIN_UNIFIED)";
  }
  auto& word = *reinterpret_cast<std::atomic<uint64_t>*>(memory_);
  word = 0;
  rendezvous.set(kOutside, kText);
  const auto time = between_hosts() == BetweenHosts::kRma ? kProbeTimeIfAsked : kProbeTime;
  const bool done = await(rendezvous, kPut, std::min(deadline, Clock::now() + time));
  if (fault.empty() && !done) {
    fault = c10::str(
        "a put by MPI (", library_path(), ") to rank ", runtime_.rank(), " was not complete within ", time.count(),
        " ms while that rank was outside of MPI, as over TCP");
  } else if (fault.empty() && word.load(std::memory_order_acquire) != kProbeWord) {
    fault = c10::str("MPI (", library_path(), ") called a put to rank ", runtime_.rank(), " complete before it was there");
  }
  while (!done && !rendezvous.has(kPut) && Clock::now() < deadline) { // the target may call MPI now
    int waiting = 0;
    check(api().Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, runtime_.communicator(), &waiting, MPI_STATUS_IGNORE), "MPI_Iprobe");
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  rendezvous.set(kSeen, kText + fault);
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

std::optional<OneSided::Address> RemoteMemory::address_of(const void* memory, size_t bytes) const {
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
