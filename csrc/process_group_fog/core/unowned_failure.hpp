// Exceptions that have nobody to go to.
#pragma once

#include <cxxabi.h>

#include <cstdio>
#include <exception>

namespace fog {

// Calls a function that fog runs between others, in a thread of its own, say: an exception that it lets out is said on stderr,
// and neither ends the process nor keeps what comes next from being done. `what` names it.
template <typename Function>
void report_unowned_failure(const char* what, Function&& function) {
  try {
    function();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fog: exception in %s: %s\n", what, error.what());
  } catch (abi::__forced_unwind&) { // pthread_exit: Python ends threads so that want its lock when it has ended
    throw;
  } catch (...) {
    std::fprintf(stderr, "fog: exception of an unknown kind in %s\n", what);
  }
}

} // namespace fog
