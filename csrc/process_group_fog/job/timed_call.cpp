#include "job/timed_call.hpp"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include <c10/util/Exception.h>

#include "job/mpi_api.hpp"

namespace fog {

void call_in_time(
    const char* name,
    Deadline deadline,
    std::chrono::milliseconds timeout,
    const std::function<std::string()>& trouble,
    const std::function<std::string()>& excuse,
    std::function<int()> call) {
  struct Attempt {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    int code = 0;
  };
  auto attempt = std::make_shared<Attempt>();
  try {
    std::thread([attempt, call = std::move(call)] {
      const int code = call();
      std::lock_guard<std::mutex> lock(attempt->mutex);
      attempt->done = true;
      attempt->code = code;
      attempt->changed.notify_all();
    }).detach();
  } catch (const std::system_error& error) {
    C10_THROW_ERROR(DistBackendError, c10::str("fog: MPI did not start: the system refuses a thread for ", name, ": ", error.what()));
  }
  std::unique_lock<std::mutex> lock(attempt->mutex);
  while (!attempt->changed.wait_for(lock, std::chrono::milliseconds(20), [&] { return attempt->done; })) {
    const auto error = trouble ? trouble() : std::string();
    if (!error.empty()) {
      C10_THROW_ERROR(DistBackendError, c10::str("fog: MPI did not start: ", error));
    }
    if (std::chrono::steady_clock::now() > deadline) {
      C10_THROW_ERROR(
          DistBackendError,
          c10::str("fog: MPI did not start within ", timeout.count(), " ms: ", name, " does not return", excuse ? excuse() : ""));
    }
  }
  check(attempt->code, name);
}

} // namespace fog
