// An MPI library whose calls hang when a test asks for it. It is linked with the real one, and replaces only these functions.
#include <mpi_abi.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

static const char* volatile stuck = ""; // the call that does not return
static volatile int asleep = 0; // whether it sleeps; otherwise it spins

void fog_test_hang(const char* name, int sleeps) {
  asleep = sleeps;
  stuck = strdup(name);
}

static void hang(const char* name) {
  while (strcmp(stuck, name) == 0) {
    asleep ? pause() : sched_yield();
  }
}

int MPI_Comm_dup(MPI_Comm comm, MPI_Comm* copy) {
  hang("MPI_Comm_dup");
  return PMPI_Comm_dup(comm, copy);
}

int MPI_Iprobe(int peer, int tag, MPI_Comm comm, int* found, MPI_Status* status) {
  hang("MPI_Iprobe");
  return PMPI_Iprobe(peer, tag, comm, found, status);
}

int MPI_Put(const void* data, int count, MPI_Datatype type, int peer, MPI_Aint to, int there, MPI_Datatype type_there, MPI_Win window) {
  hang("MPI_Put");
  return PMPI_Put(data, count, type, peer, to, there, type_there, window);
}

int MPI_Win_flush(int peer, MPI_Win window) {
  hang("MPI_Win_flush");
  return PMPI_Win_flush(peer, window);
}
