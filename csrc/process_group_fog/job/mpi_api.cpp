#include "job/mpi_api.hpp"

#include <dlfcn.h>

#include <mutex>
#include <sstream>
#include <stdexcept>

#include <c10/util/Exception.h>

namespace fog {
namespace {

Api table;
std::mutex loading;
bool loaded = false;
std::string chosen_path;

} // namespace

void choose(const std::string& path) {
  const std::lock_guard<std::mutex> lock(loading);
  chosen_path = loaded ? chosen_path : path;
}

void load() {
  const std::lock_guard<std::mutex> lock(loading);
  if (loaded) {
    return;
  }
  const auto& path = chosen_path;
#ifdef FOG_NATIVE_MPI
#define FOG_MPI_FILL(name) table.name = &MPI_##name;
  FOG_MPI_FUNCTIONS(FOG_MPI_FILL)
#undef FOG_MPI_FILL
  chosen_path = path.empty() ? "linked at build time" : path;
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
  // A libmpi.so of MPICH or Open MPI with another ABI could be loaded too, but would misread fog's handles. In MPICH's
  // this function exists, and returns -1.
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
#endif
  loaded = true;
}

const Api& api() {
  TORCH_INTERNAL_ASSERT(loaded, "fog: MPI was called before its library was loaded");
  return table;
}

const std::string& library_path() {
  return chosen_path;
}

std::string library_version() {
  load();
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  check(table.Get_library_version(text, &length), "MPI_Get_library_version");
  return {text, static_cast<size_t>(length)};
}

std::string error_text(int code) {
  char text[MPI_MAX_ERROR_STRING + 1] = {};
  int length = 0;
  if (table.Error_string(code, text, &length) != MPI_SUCCESS || length == 0) {
    return "unknown MPI error";
  }
  std::istringstream lines(text);
  std::string first;
  std::getline(lines, first);
  const auto trace = first.find(", error stack:");
  if (trace == std::string::npos) {
    return text;
  }
  // The innermost call, last in the trace, has the most specific message. Its name and line do not matter.
  std::string innermost;
  for (std::string line; std::getline(lines, line);) {
    const auto message = line.find("): ");
    if (message != std::string::npos) {
      innermost = line.substr(message + 3);
    } else if (!line.empty() && line.find("(unknown)") == std::string::npos) {
      innermost = line;
    }
  }
  return first.substr(0, trace) + (innermost.empty() ? "" : ": " + innermost);
}

void check(int code, const char* what) {
  if (code != MPI_SUCCESS) {
    C10_THROW_ERROR(DistBackendError, c10::str("fog: ", what, " failed: ", error_text(code), " (code ", code, ")"));
  }
}

} // namespace fog
