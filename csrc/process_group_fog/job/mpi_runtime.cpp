#include "job/mpi_runtime.hpp"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include <c10/util/Exception.h>

#include "core/failure.hpp"
#include "core/settings.hpp"
#include "job/hosts.hpp"
#include "job/peer_information.hpp"
#include "job/timed_call.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

// Sets variables for MPI_Init and restores them afterwards. Otherwise programs that this process starts would take
// themselves for ranks of its job.
class ScopedEnvironment {
 public:
  ~ScopedEnvironment() {
    for (const auto& [name, old] : saved_) {
      old ? setenv(name.c_str(), old->c_str(), 1) : unsetenv(name.c_str());
    }
  }
  void set(const std::string& name, const std::string& value) {
    save(name);
    setenv(name.c_str(), value.c_str(), 1);
  }
  void unset(const std::string& name) {
    save(name);
    unsetenv(name.c_str());
  }

 private:
  void save(const std::string& name) {
    const char* old = std::getenv(name.c_str());
    saved_.emplace_back(name, old ? std::optional<std::string>(old) : std::nullopt);
  }
  std::vector<std::pair<std::string, std::optional<std::string>>> saved_;
};

// Removes the names of the shared-memory files that MPI mapped at start-up. All local ranks have attached to them at
// this point. Without a name, the memory is freed when the last rank ends in any way; MPICH leaves the files behind
// after a kill -9.
void unlink_shared_memory_names() {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    const auto at = line.find("/dev/shm/");
    if (at == std::string::npos || line.find("(deleted)") != std::string::npos) {
      continue;
    }
    const auto path = line.substr(at);
    if (path.find("mpich") != std::string::npos || path.find("fog_") != std::string::npos) {
      unlink(path.c_str());
    }
  }
}

const char* name_of_level(int level) {
  return level == MPI_THREAD_SINGLE    ? "MPI_THREAD_SINGLE"
      : level == MPI_THREAD_FUNNELED   ? "MPI_THREAD_FUNNELED"
      : level == MPI_THREAD_SERIALIZED ? "MPI_THREAD_SERIALIZED"
                                       : "MPI_THREAD_MULTIPLE";
}

} // namespace

Runtime& Runtime::instance() {
  static auto* runtime = new Runtime();
  return *runtime;
}

// MPI_Init ends the process where a network cannot be used, for example if UCX_TLS names none. A session reports it.
void Runtime::prepare(Deadline deadline, std::chrono::milliseconds timeout) {
  // fog stages device memory itself, and MPI's detection of GPUs would take time at the start.
  setenv("MPIR_CVAR_ENABLE_GPU", "0", 0);
#if MPI_VERSION >= 4
  int running = 0;
  check(api().Initialized(&running), "MPI_Initialized");
  if (running != 0) {
    return;
  }
  auto session = std::make_shared<MPI_Session>(MPI_SESSION_NULL);
  call_in_time(
      "MPI_Session_init", deadline, timeout, [this] { return pmi_ ? pmi_->error() : std::string(); }, nullptr,
      [session] {
        MPI_Info info = MPI_INFO_NULL;
        api().Info_create(&info);
        api().Info_set(info, "thread_level", "MPI_THREAD_SERIALIZED");
        const int code = api().Session_init(info, MPI_ERRORS_RETURN, session.get());
        api().Info_free(&info);
        return code;
      });
  session_ = *session;
#endif
}

void Runtime::initialize(Deadline deadline, std::chrono::milliseconds timeout) {
  int running = 0;
  check(api().Initialized(&running), "MPI_Initialized");
  int provided = 0;
  if (running != 0) { // by the program itself, through another user of the same library
    check(api().Query_thread(&provided), "MPI_Query_thread");
    if (provided < MPI_THREAD_MULTIPLE) {
      C10_THROW_ERROR(
          DistBackendError,
          c10::str(
              "fog: something else in this program has started MPI (", library_path(), ") with ", name_of_level(provided),
              "; beside another user of MPI, fog needs MPI_THREAD_MULTIPLE, because each uses its own lock for MPI. With mpi4py, set "
              "mpi4py.rc.thread_level = \"multiple\" before \"from mpi4py import MPI\"; otherwise call MPI_Init_thread with MPI_THREAD_MULTIPLE."));
    }
    return;
  }
  auto level = std::make_shared<int>(0);
  call_in_time(
      "MPI_Init_thread", deadline, timeout, [this] { return pmi_ ? pmi_->error() : std::string(); }, nullptr,
      [level] { return api().Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, level.get()); });
  initialized_here_ = true;
#if MPI_VERSION >= 4
  if (session_ != MPI_SESSION_NULL) {
    api().Session_finalize(&session_);
  }
#endif
  if (*level < MPI_THREAD_SERIALIZED) {
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            "fog: needs MPI_THREAD_SERIALIZED, but the MPI library ", library_path(), " offers ", name_of_level(*level), " at most"));
  }
}

void Runtime::adopt_world(Deadline deadline, std::chrono::milliseconds timeout, const Excuse& excuse) {
  check(api().Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  auto copy = std::make_shared<MPI_Comm>(MPI_COMM_NULL);
  call_in_time("MPI_Comm_dup", deadline, timeout, nullptr, excuse, [copy] { return api().Comm_dup(MPI_COMM_WORLD, copy.get()); });
  communicator_ = *copy;
  check(api().Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  check(api().Comm_rank(communicator_, &rank_), "MPI_Comm_rank");
  check(api().Comm_size(communicator_, &size_), "MPI_Comm_size");
}

bool Runtime::launched(int rank, int size) {
  const auto now = settings();
  return now.launcher_size == size && now.launcher_rank == rank;
}

void Runtime::join(std::string job, int rank, int size, int max_ranks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  job_ = std::move(job);
  rank_ = rank;
  size_ = size;
  max_ranks_ = max_ranks;
  joined_ = true;
}

void Runtime::settle(std::string host, std::vector<int> nodes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  host_ = std::move(host);
  nodes_ = std::move(nodes);
}

std::string Runtime::start(const std::shared_ptr<Rendezvous>& rendezvous, const std::string& job, std::chrono::milliseconds timeout) {
  const int rank = rendezvous->rank();
  const int size = rendezvous->size();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (started_) {
    return "";
  }
  check_first_start();
  const auto deadline = deadline_after(timeout);
  ScopedEnvironment environment;
  // Each step begins on all ranks or on none: within a step, a rank waits for one that has failed until the timeout.
  auto failure = rendezvous->first_failure("mpi-prepared", [&] {
    load();
    launched_ = launched(rank, size);
    if (!launched_) {
      pmi_ = std::make_unique<PmiServer>(rendezvous, job, process_mapping(nodes_));
      for (const char* inherited : {"PMI_PORT", "PMI_ID", "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_SERVER_URI2", "PMIX_SERVER_URI3"}) {
        environment.unset(inherited);
      }
      environment.set("PMI_FD", std::to_string(pmi_->client_fd()));
      environment.set("PMI_RANK", std::to_string(rank));
      environment.set("PMI_SIZE", std::to_string(size));
      environment.set("MPIR_CVAR_PMI_VERSION", "1");
    }
    prepare(deadline, timeout);
  });
  if (failure.empty()) {
    const auto versions = rendezvous->allgather("mpi", own_information().protocol + ", MPI " + short_version(library_version()));
    failure = rendezvous->first_failure("mpi-started", [&] {
      check_versions(versions);
      initialize(deadline, timeout);
      constexpr const char* kInitialized = "mpi-initialized";
      rendezvous->note(kInitialized);
      adopt_world(deadline, timeout, [&] {
        const auto missing = rendezvous->not_noted(kInitialized);
        return missing.empty() ? missing : "; not there: rank(s) " + missing;
      });
      TORCH_CHECK_WITH(
          DistBackendError, rank_ == rank && size_ == size, "MPI started as rank ", rank_, " of ", size_,
          ", the group has this process as rank ", rank, " of ", size);
    });
  }
  unlink_shared_memory_names();
  started_ = failure.empty();
  return failure;
}

void Runtime::start_from_launcher(std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (started_) {
    return;
  }
  if (settings().launcher_size == 0) {
    C10_THROW_ERROR(DistBackendError, "fog: no launcher: neither mpiexec nor srun set a rank and a size in the environment");
  }
  check_first_start();
  load();
  launched_ = true;
  try {
    const auto deadline = deadline_after(timeout);
    prepare(deadline, timeout);
    initialize(deadline, timeout);
    adopt_world(deadline, timeout, [] { return std::string("; not every rank that the launcher has started is there"); });
    job_ = broadcast_in_time(random_job_name(), deadline, timeout);
    started_ = true;
    joined_ = true;
  } catch (const std::exception& error) {
    failure_ = message_of(error);
    unlink_shared_memory_names();
    throw;
  }
  unlink_shared_memory_names(); // all local ranks have attached: the broadcast is no barrier, but MPI_Comm_dup was one
}

std::string Runtime::broadcast(const std::string& text, std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!started_) {
    check_first_start();
    C10_THROW_ERROR(DistBackendError, "fog: MPI has not been started");
  }
  try {
    return broadcast_in_time(text, deadline_after(timeout), timeout);
  } catch (const c10::ValueError&) {
    throw;
  } catch (const std::exception& error) {
    started_ = false; // the call that has not returned still holds MPI
    joined_ = false;
    failure_ = message_of(error);
    throw;
  }
}

std::string Runtime::broadcast_in_time(const std::string& text, Deadline deadline, std::chrono::milliseconds timeout) {
  auto buffer = std::make_shared<std::array<char, 512>>();
  buffer->fill(0);
  TORCH_CHECK_VALUE(text.size() < buffer->size(), "fog: text of ", text.size(), " characters; at most ", buffer->size() - 1);
  std::memcpy(buffer->data(), text.data(), text.size());
  call_in_time(
      "MPI_Bcast", deadline, timeout, nullptr,
      [] { return std::string("; not there: rank(s) 0, from which it comes, or one on the way"); },
      [buffer, communicator = communicator_] {
        return api().Bcast(buffer->data(), static_cast<int>(buffer->size()), MPI_BYTE, 0, communicator);
      });
  return buffer->data();
}

void Runtime::fail(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  started_ = false;
  joined_ = false;
  failure_ = reason;
}

void Runtime::check_first_start() const {
  if (!failure_.empty()) {
    C10_THROW_ERROR(
        DistBackendError, "fog: MPI cannot be started a second time in a process; the first start failed with: " + failure_);
  }
}

void Runtime::finalize(bool healthy) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!started_ || finalized_) {
    return;
  }
  finalized_ = true;
  int ended = 0;
  if (launched_ && initialized_here_ && healthy && api().Finalized(&ended) == MPI_SUCCESS && ended == 0) {
    // MPI_Finalize waits for all ranks of the world, however long they run; ranks of a launcher expect this. If a rank
    // dies meanwhile, the launcher ends this one.
    api().Finalize();
  }
}

} // namespace fog
