// Wraps an MPI library and counts a mistake that MPI forbids: a receive into memory that an incomplete send still reads. Sends
// of large data are reported complete late, which MPI allows. fog calls MPI under one lock, so this library needs none.
#include <mpi_abi.h>

#include <chrono>
#include <map>
#include <vector>

namespace {

constexpr int kLarge = 8192; // fog sends smaller data from its own memory

using Clock = std::chrono::steady_clock;
constexpr auto kHeld = std::chrono::milliseconds(20);

struct Sending {
  const char* begin;
  const char* end;
  Clock::time_point held_until;
};

std::map<MPI_Request, Sending> sending;
long forbidden = 0;
long receives = 0;

} // namespace

extern "C" {

int MPI_Isend(const void* data, int count, MPI_Datatype type, int destination, int tag, MPI_Comm comm, MPI_Request* request) {
  const int code = PMPI_Isend(data, count, type, destination, tag, comm, request);
  if (code == MPI_SUCCESS && count > kLarge) {
    const auto* begin = static_cast<const char*>(data);
    sending[*request] = {begin, begin + count, Clock::now() + kHeld};
  }
  return code;
}

int MPI_Irecv(void* data, int count, MPI_Datatype type, int source, int tag, MPI_Comm comm, MPI_Request* request) {
  const auto* begin = static_cast<const char*>(data);
  ++receives;
  for (const auto& [other, sent] : sending) {
    forbidden += begin < sent.end && sent.begin < begin + count ? 1 : 0;
  }
  return PMPI_Irecv(data, count, type, source, tag, comm, request);
}

int MPI_Test(MPI_Request* request, int* flag, MPI_Status* status) {
  const auto before = *request;
  const int code = PMPI_Test(request, flag, status);
  if (*flag != 0) {
    sending.erase(before);
  }
  return code;
}

int MPI_Testsome(int count, MPI_Request requests[], int* completed, int indices[], MPI_Status statuses[]) {
  // Held requests are left out; MPI ignores null requests.
  std::vector<MPI_Request> asked(requests, requests + count);
  bool any = false;
  for (auto& request : asked) {
    const auto found = sending.find(request);
    if (found != sending.end() && found->second.held_until > Clock::now()) {
      request = MPI_REQUEST_NULL;
    }
    any = any || request != MPI_REQUEST_NULL;
  }
  const auto before = asked;
  const int code = PMPI_Testsome(count, asked.data(), completed, indices, statuses);
  if (!any) {
    *completed = 0; // the held requests are not complete
  }
  for (int i = 0; *completed != MPI_UNDEFINED && i < *completed; ++i) {
    sending.erase(before[indices[i]]);
    requests[indices[i]] = asked[indices[i]];
  }
  return code;
}

long forbidden_receives() {
  return forbidden;
}

long all_receives() {
  return receives;
}

} // extern "C"
