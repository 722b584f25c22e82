#include "transport/mpi/rma_probe.hpp"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>
#include <vector>

#include <c10/util/Exception.h>

#include "core/deadline.hpp"
#include "core/failure.hpp"
#include "core/settings.hpp"
#include "job/network_interface.hpp"
#include "job/peer_sockets.hpp"
#include "job/timed_call.hpp"
#include "transport/mpi/remote_memory.hpp"

namespace fog::mpi {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr uint64_t kProbeWord = 0x666f672d70726f62; // "fog-prob"
// The time for which the target stays outside of MPI. A put by the fabric takes microseconds, but the origin must first be
// scheduled on a core. If the user has asked for RMA the wait is longer: less than RMA can do would be lost.
constexpr auto kOutsideTime = milliseconds(200);
constexpr auto kOutsideTimeIfAsked = milliseconds(3000);
// The time within which the put must complete once the target calls MPI.
constexpr auto kInsideTime = milliseconds(5000);
// What is measured: the fastest of some parts by each way, since another program may take a core from one of them. TCP gets
// a multiple of the time of all puts.
constexpr size_t kMeasured = size_t(16) << 20;
constexpr size_t kParts = 4;
constexpr size_t kPart = kMeasured / kParts;
constexpr int kTimeOfTcp = 4;
// By how much puts must be faster than TCP: MPI is not worth a smaller gain.
constexpr double kGain = 1.25;
constexpr size_t kWarmUp = RemoteMemory::kMostBytes;

// Keys of the Store at which the origin and the target report.
constexpr const char* kOutside = "rma-target-outside-mpi";
constexpr const char* kPut = "rma-put-done";
constexpr const char* kSeen = "rma-put-seen";
constexpr const char* kFast = "rma-measured";
// The reports. A fault has this prefix.
constexpr const char* kFault = "!";
constexpr const char* kAlone = "alone";
constexpr const char* kTogether = "together";

bool is_fault(const std::string& report) {
  return report.compare(0, 1, kFault) == 0;
}

// Waits for a report. Throws DistBackendError at the deadline.
std::string await(Rendezvous& rendezvous, const char* key, int of, Deadline deadline) {
  while (!rendezvous.has(key)) {
    TORCH_CHECK_WITH(DistBackendError, Clock::now() < deadline, "rank ", of, " has not said whether a put by MPI reaches it");
    std::this_thread::sleep_for(milliseconds(1));
  }
  return rendezvous.get(key);
}

// Sends bytes and waits for the other side's word that they have come. Returns false at the limit.
bool send_all(const OwnedSocket& socket, const std::vector<char>& data, size_t bytes, Clock::time_point limit) {
  while (bytes > 0) {
    const auto sent = send(socket.fd(), data.data(), std::min(bytes, data.size()), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes -= static_cast<size_t>(sent);
    } else if ((sent < 0 && errno != EAGAIN && errno != EINTR) || !socket.await(POLLOUT, limit)) {
      return false;
    }
  }
  char word = 0;
  return socket.await(POLLIN, limit) && recv(socket.fd(), &word, 1, 0) == 1;
}

// One side of the probe.
class Side {
 public:
  Side(Runtime& runtime, Rendezvous& rendezvous, MPI_Win window, int target, milliseconds timeout)
      : runtime_(runtime),
        rendezvous_(rendezvous),
        window_(window),
        target_(target),
        timeout_(timeout),
        deadline_(deadline_after(timeout)),
        measures_(settings().between_hosts == "auto") {}

  // Returns the report.
  std::string as_origin() {
    auto report = await(rendezvous_, kOutside, target_, deadline_);
    if (is_fault(report)) {
      return report;
    }
    call_in_time("MPI_Win_flush", std::min(deadline_, Clock::now() + 2 * kInsideTime), 2 * kInsideTime, nullptr, nullptr, [this] {
      static const uint64_t word = kProbeWord;
      return put(window_, target_, &word, sizeof(word));
    });
    rendezvous_.set(kPut, "1");
    report = await(rendezvous_, kSeen, target_, deadline_);
    if (is_fault(report) || !measures_) {
      return report;
    }
    auto fault = measure(report.substr(report.find(' ') + 1));
    rendezvous_.set(kFast, "1");
    return fault.empty() ? report.substr(0, report.find(' ')) : kFault + fault;
  }

  void as_target(char* memory) {
    int* model = nullptr;
    int found = 0;
    check(api().Win_get_attr(window_, MPI_WIN_MODEL, &model, &found), "MPI_Win_get_attr");
    if (found == 0 || *model != MPI_WIN_UNIFIED) {
      rendezvous_.set(kOutside, c10::str(kFault, "this MPI keeps a copy of a window's memory (its model is not MPI_WIN_UNIFIED)"));
      return;
    }
    const auto& word = *new (memory) std::atomic<uint64_t>(0);
    const auto has_come = [&] { return word.load(std::memory_order_acquire) == kProbeWord && rendezvous_.has(kPut); };
    rendezvous_.set(kOutside, "outside");
    auto limit = std::min(deadline_, Clock::now() + (measures_ ? kOutsideTime : kOutsideTimeIfAsked));
    // A library may call a put complete before it is there, for example OFI's over TCP.
    while (!has_come() && !rendezvous_.has(kPut) && Clock::now() < limit) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    const bool alone = has_come();
    for (limit = std::min(deadline_, Clock::now() + kInsideTime); !has_come() && Clock::now() < limit;) {
      call_mpi();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (!has_come()) {
      const auto* what = rendezvous_.has(kPut) ? " was called complete, but had not come" : " was not complete";
      rendezvous_.set(
          kSeen,
          c10::str(
              kFault, "a put by MPI (", library_path(), ") to rank ", runtime_.rank(), what, " after that rank had called MPI for ",
              kInsideTime.count(), " ms"));
      return;
    }
    const auto own = addresses_towards(rendezvous_.store_host());
    const OwnedSocket listener(measures_ ? listen_at(own) : -1);
    rendezvous_.set(kSeen, c10::str(alone ? kAlone : kTogether, ' ', describe_listener(listener.fd(), own)));
    if (measures_) {
      serve(listener, alone);
    }
  }

 private:
  static int put(MPI_Win window, int target, const void* data, int bytes) {
    const int code = api().Put(data, bytes, MPI_BYTE, target, 0, bytes, MPI_BYTE, window);
    const int flushed = api().Win_flush(target, window);
    return code == MPI_SUCCESS ? flushed : code;
  }

  void call_mpi() {
    int waiting = 0;
    check(api().Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, runtime_.communicator(), &waiting, MPI_STATUS_IGNORE), "MPI_Iprobe");
  }

  // Returns why RMA does not pay; empty if it does.
  std::string measure(const std::string& listener) {
    const auto data = std::make_shared<std::vector<char>>(kWarmUp);
    const auto put_all = [&](size_t bytes) {
      for (size_t sent = 0; sent < bytes; sent += kWarmUp) {
        call_in_time("MPI_Win_flush", deadline_, timeout_, nullptr, nullptr, [window = window_, target = target_, data] {
          return put(window, target, data->data(), static_cast<int>(data->size()));
        });
      }
    };
    put_all(kWarmUp);
    const auto first_put = Clock::now();
    auto by_rma = Clock::duration::max();
    for (size_t part = 0; part < kParts; ++part) {
      const auto began = Clock::now();
      put_all(kPart);
      by_rma = std::min(by_rma, Clock::now() - began);
    }
    const auto all_puts = Clock::now() - first_put;
    for (const auto& place : read_listener(listener, own_addresses())) {
      const OwnedSocket socket(begin_to_connect(place));
      if (socket.fd() < 0 || !socket.await(POLLOUT, Clock::now() + std::chrono::seconds(1)) || error_of_socket(socket.fd()) != 0 ||
          !send_all(socket, *data, kWarmUp, deadline_)) {
        continue;
      }
      const auto limit = std::min(deadline_, Clock::now() + kTimeOfTcp * all_puts);
      for (size_t part = 0; part < kParts; ++part) {
        const auto began = Clock::now();
        if (!send_all(socket, *data, kPart, limit)) {
          break;
        }
        if (const auto by_tcp = Clock::now() - began; by_tcp <= kGain * by_rma) {
          const auto ms = [](Clock::duration time) { return std::chrono::duration<double, std::milli>(time).count(); };
          return c10::str("puts by MPI take ", ms(by_rma), " ms for ", kPart >> 20, " MiB, TCP takes ", ms(by_tcp), " ms");
        }
      }
      return "";
    }
    return ""; // no TCP connection for the comparison
  }

  // Takes the data that comes by TCP, until the origin has measured.
  void serve(const OwnedSocket& listener, bool alone) {
    std::vector<char> taken(kWarmUp);
    int fd = -1;
    size_t bytes = 0;
    auto next_question = Clock::now();
    while (Clock::now() < deadline_) {
      if (!alone) {
        call_mpi();
      }
      if (const auto now = Clock::now(); now >= next_question) {
        if (rendezvous_.has(kFast)) {
          break;
        }
        next_question = now + milliseconds(5);
      }
      const int from = fd >= 0 ? fd : listener.fd();
      pollfd polled = {from, POLLIN, 0};
      if (::poll(&polled, 1, alone ? 1 : 0) != 1) {
        continue;
      }
      if (fd < 0) {
        fd = accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
        continue;
      }
      const auto part = bytes < kWarmUp ? kWarmUp - bytes : kPart - (bytes - kWarmUp) % kPart; // what is left of it
      const auto count = recv(fd, taken.data(), std::min(taken.size(), part), 0);
      if (count <= 0) { // the origin has seen enough
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        continue;
      }
      bytes += static_cast<size_t>(count);
      if (static_cast<size_t>(count) == part && send(fd, "1", 1, MSG_NOSIGNAL) != 1) {
        break;
      }
    }
    const OwnedSocket closed(fd);
  }

  Runtime& runtime_;
  Rendezvous& rendezvous_;
  const MPI_Win window_;
  const int target_;
  const milliseconds timeout_;
  const Deadline deadline_;
  const bool measures_;
};

} // namespace

Answer probe(Runtime& runtime, Rendezvous& rendezvous, MPI_Win window, char* memory, milliseconds timeout) {
  const auto& nodes = runtime.nodes();
  const auto elsewhere = std::find_if(nodes.begin(), nodes.end(), [&](int node) { return node != nodes[0]; });
  const int target = static_cast<int>(elsewhere - nodes.begin());
  Side side(runtime, rendezvous, window, target, timeout);
  if (runtime.rank() == target) {
    try {
      side.as_target(memory);
    } catch (const std::exception& error) {
      for (const char* key : {kOutside, kSeen}) { // whatever rank 0 waits for
        rendezvous.set(key, kFault + message_of(error));
      }
    }
  }
  for (const char* key : {kOutside, kPut, kSeen, kFast}) {
    rendezvous.discard(key);
  }
  const auto report = rendezvous.from_rank_zero("rma", [&] {
    try {
      return side.as_origin();
    } catch (const std::exception& error) { // a call that has not returned may hold MPI
      runtime.stop();
      const auto reason = message_of(error);
      return kFault + reason.substr(reason.compare(0, 5, "fog: ") == 0 ? 5 : 0);
    }
  });
  return {is_fault(report) ? report.substr(1) : "", report.compare(0, std::string(kAlone).size(), kAlone) == 0};
}

} // namespace fog::mpi
