// A table of pointers to the MPI functions that fog calls.
//
// In the default build the table is filled at run time from a library that follows the MPI standard ABI (MPI-5.0,
// chapter 20). The library is opened privately: its symbols stay out of the global scope, so another user of MPI in the
// same process, such as mpi4py, keeps its own. A native build (FOG_NATIVE_MPI) fills the table from the library that
// the site's mpicxx links.
#pragma once

#include <string>

#ifdef FOG_NATIVE_MPI
#include <mpi.h>
#else
#include <mpi_abi.h>
#endif

namespace fog {

#if MPI_VERSION >= 4
#define FOG_MPI_SESSIONS(X) X(Info_create) X(Info_set) X(Info_free) X(Session_init) X(Session_finalize)
#else
#define FOG_MPI_SESSIONS(X)
#endif

#define FOG_MPI_FUNCTIONS(X) \
  X(Initialized)             \
  X(Finalized)               \
  X(Init_thread)             \
  X(Query_thread)            \
  X(Finalize)                \
  X(Comm_rank)               \
  X(Comm_size)               \
  X(Comm_dup)                \
  X(Comm_set_errhandler)     \
  X(Iprobe)                  \
  X(Bcast)                   \
  X(Win_create)              \
  X(Win_set_errhandler)      \
  X(Win_get_attr)            \
  X(Win_lock_all)            \
  X(Win_flush)               \
  X(Put)                     \
  X(Get)                     \
  X(Error_string)            \
  X(Get_library_version)     \
  FOG_MPI_SESSIONS(X)

struct Api {
#define FOG_MPI_MEMBER(name) decltype(&MPI_##name) name = nullptr;
  FOG_MPI_FUNCTIONS(FOG_MPI_MEMBER)
#undef FOG_MPI_MEMBER
};

// Selects the library that load() opens. It has no effect once a library is open. Only a native build allows an empty
// path.
void choose(const std::string& path);

// Opens the library, which takes 30 ms, and fills the table. Throws std::runtime_error with the path and the missing
// symbol or property. Further calls do nothing.
void load();

// Returns the table; load() must have succeeded.
const Api& api();

// Returns the path of the library, or an empty string before choose().
const std::string& library_path();

// Loads the library and returns its version text.
std::string library_version();

// Returns MPI's text for an error code, without the trace of inner calls that MPICH adds.
std::string error_text(int code);

// Throws DistBackendError with MPI's own text unless `code` is MPI_SUCCESS. `what` names the call.
void check(int code, const char* what);

} // namespace fog
