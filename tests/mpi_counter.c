// An MPI library that counts calls and their bytes, by name. It is linked with the real one, and replaces only these functions.
// fog calls MPI under a lock, and the counts are read between operations, so they are plain numbers.
#include <mpi_abi.h>
#include <string.h>

enum {
  kPut, kGet, kFlush, kIsend, kIssend, kIrecv,
  // Functions that fog must not call.
  kRput, kRget, kRaccumulate, kRgetAccumulate, kAccumulate, kGetAccumulate, kFetchAndOp, kCompareAndSwap, kCreateDynamic,
  kCount
};

static const char* const names[kCount] = {
    "MPI_Put",         "MPI_Get",        "MPI_Win_flush",      "MPI_Isend",        "MPI_Issend",
    "MPI_Irecv",       "MPI_Rput",       "MPI_Rget",           "MPI_Raccumulate",  "MPI_Rget_accumulate",
    "MPI_Accumulate",  "MPI_Get_accumulate", "MPI_Fetch_and_op", "MPI_Compare_and_swap", "MPI_Win_create_dynamic"};

static volatile long long calls[kCount], bytes[kCount], largest[kCount];

static int of(const char* name) {
  int index = 0;
  while (index < kCount && strcmp(names[index], name) != 0) {
    ++index;
  }
  return index < kCount ? index : -1;
}

void fog_test_reset(void) {
  for (int index = 0; index < kCount; ++index) {
    calls[index] = bytes[index] = largest[index] = 0;
  }
}

// Returns the calls of a function; -1 if they are not counted.
long long fog_test_calls(const char* name) {
  return of(name) < 0 ? -1 : calls[of(name)];
}

long long fog_test_bytes(const char* name) {
  return of(name) < 0 ? -1 : bytes[of(name)];
}

// Returns the bytes of the largest call.
long long fog_test_largest(const char* name) {
  return of(name) < 0 ? -1 : largest[of(name)];
}

static void note(int index, MPI_Count count, MPI_Datatype type) {
  int size = 0;
  PMPI_Type_size(type, &size);
  const long long moved = (long long)count * size;
  ++calls[index];
  bytes[index] += moved;
  if (moved > largest[index]) {
    largest[index] = moved;
  }
}

#define TARGET int rank, MPI_Aint at, int target_count, MPI_Datatype target_type
#define TARGET_GIVEN rank, at, target_count, target_type

int MPI_Put(const void* data, int count, MPI_Datatype type, TARGET, MPI_Win window) {
  note(kPut, count, type);
  return PMPI_Put(data, count, type, TARGET_GIVEN, window);
}

int MPI_Get(void* data, int count, MPI_Datatype type, TARGET, MPI_Win window) {
  note(kGet, count, type);
  return PMPI_Get(data, count, type, TARGET_GIVEN, window);
}

int MPI_Win_flush(int rank, MPI_Win window) {
  note(kFlush, 0, MPI_BYTE);
  return PMPI_Win_flush(rank, window);
}

int MPI_Isend(const void* data, int count, MPI_Datatype type, int rank, int tag, MPI_Comm comm, MPI_Request* request) {
  note(kIsend, count, type);
  return PMPI_Isend(data, count, type, rank, tag, comm, request);
}

int MPI_Issend(const void* data, int count, MPI_Datatype type, int rank, int tag, MPI_Comm comm, MPI_Request* request) {
  note(kIssend, count, type);
  return PMPI_Issend(data, count, type, rank, tag, comm, request);
}

int MPI_Irecv(void* data, int count, MPI_Datatype type, int rank, int tag, MPI_Comm comm, MPI_Request* request) {
  note(kIrecv, count, type);
  return PMPI_Irecv(data, count, type, rank, tag, comm, request);
}

int MPI_Rput(const void* data, int count, MPI_Datatype type, TARGET, MPI_Win window, MPI_Request* request) {
  note(kRput, count, type);
  return PMPI_Rput(data, count, type, TARGET_GIVEN, window, request);
}

int MPI_Rget(void* data, int count, MPI_Datatype type, TARGET, MPI_Win window, MPI_Request* request) {
  note(kRget, count, type);
  return PMPI_Rget(data, count, type, TARGET_GIVEN, window, request);
}

int MPI_Raccumulate(
    const void* data, int count, MPI_Datatype type, TARGET, MPI_Op op, MPI_Win window, MPI_Request* request) {
  note(kRaccumulate, count, type);
  return PMPI_Raccumulate(data, count, type, TARGET_GIVEN, op, window, request);
}

int MPI_Rget_accumulate(
    const void* data, int count, MPI_Datatype type, void* result, int result_count, MPI_Datatype result_type, TARGET,
    MPI_Op op, MPI_Win window, MPI_Request* request) {
  note(kRgetAccumulate, count, type);
  return PMPI_Rget_accumulate(data, count, type, result, result_count, result_type, TARGET_GIVEN, op, window, request);
}

int MPI_Accumulate(const void* data, int count, MPI_Datatype type, TARGET, MPI_Op op, MPI_Win window) {
  note(kAccumulate, count, type);
  return PMPI_Accumulate(data, count, type, TARGET_GIVEN, op, window);
}

int MPI_Get_accumulate(
    const void* data, int count, MPI_Datatype type, void* result, int result_count, MPI_Datatype result_type, TARGET,
    MPI_Op op, MPI_Win window) {
  note(kGetAccumulate, count, type);
  return PMPI_Get_accumulate(data, count, type, result, result_count, result_type, TARGET_GIVEN, op, window);
}

int MPI_Fetch_and_op(
    const void* data, void* result, MPI_Datatype type, int rank, MPI_Aint at, MPI_Op op, MPI_Win window) {
  note(kFetchAndOp, 1, type);
  return PMPI_Fetch_and_op(data, result, type, rank, at, op, window);
}

int MPI_Compare_and_swap(
    const void* data, const void* compared, void* result, MPI_Datatype type, int rank, MPI_Aint at, MPI_Win window) {
  note(kCompareAndSwap, 1, type);
  return PMPI_Compare_and_swap(data, compared, result, type, rank, at, window);
}

int MPI_Win_create_dynamic(MPI_Info info, MPI_Comm comm, MPI_Win* window) {
  note(kCreateDynamic, 0, MPI_BYTE);
  return PMPI_Win_create_dynamic(info, comm, window);
}
