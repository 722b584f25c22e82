#include "api.hpp"

#include <dlfcn.h>

#include <stdexcept>

#include <c10/util/Exception.h>

namespace fog::mpi {
namespace {

Api table;
bool loaded = false;
std::string loaded_path;

} // namespace

void load(const std::string& path) {
  if (loaded) {
    return;
  }
#ifdef FOG_NATIVE_MPI
#define FOG_MPI_FILL(name) table.name = &MPI_##name;
  FOG_MPI_FUNCTIONS(FOG_MPI_FILL)
#undef FOG_MPI_FILL
  loaded_path = path.empty() ? "linked at build time" : path;
#else
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw std::runtime_error("cannot open the MPI library " + path + ": " + dlerror());
  }
  auto symbol = [&](const char* name) {
    void* address = dlsym(library, name);
    if (address == nullptr) {
      throw std::runtime_error(
          "the MPI library " + path + " has no " + name + "; fog needs one that follows the MPI standard ABI " +
          "(libmpi_abi.so of MPICH 5, Intel MPI 2021.17 or Open MPI 6)");
    }
    return address;
  };
  // A libmpi.so of MPICH or Open MPI would load as well and then read fog's handles as its own. MPICH's has this function,
  // but answers -1.
  int major = -1;
  int minor = -1;
  reinterpret_cast<decltype(&MPI_Abi_get_version)>(symbol("MPI_Abi_get_version"))(&major, &minor);
  if (major < 1) {
    throw std::runtime_error(
        "the MPI library " + path + " does not follow the MPI standard ABI; fog needs one that does (libmpi_abi.so of MPICH 5, " +
        "Intel MPI 2021.17 or Open MPI 6)");
  }
#define FOG_MPI_FILL(name) table.name = reinterpret_cast<decltype(table.name)>(symbol("MPI_" #name));
  FOG_MPI_FUNCTIONS(FOG_MPI_FILL)
#undef FOG_MPI_FILL
  loaded_path = path;
#endif
  loaded = true;
}

const Api& api() {
  TORCH_INTERNAL_ASSERT(loaded, "fog: MPI was called before its library was loaded");
  return table;
}

const std::string& library_path() {
  return loaded_path;
}

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) {
    return;
  }
  char text[MPI_MAX_ERROR_STRING + 1] = {};
  int length = 0;
  if (table.Error_string(code, text, &length) != MPI_SUCCESS) {
    length = 0;
  }
  C10_THROW_ERROR(
      DistBackendError, c10::str("fog: ", what, " failed: ", length > 0 ? text : "unknown MPI error", " (code ", code, ")"));
}

} // namespace fog::mpi
