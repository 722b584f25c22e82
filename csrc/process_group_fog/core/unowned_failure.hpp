// Reports exceptions that no caller can receive.
#pragma once

#include <cxxabi.h>

#include <cstdio>
#include <exception>

namespace fog {

// Calls a function that has no caller to report to, for example in a thread of fog. An exception of the function is
// printed to stderr; it neither ends the process nor stops the work that follows. `what` names the function in the
// message.
template <typename Function>
void report_unowned_failure(const char* what, Function&& function) {
  try {
    function();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fog: exception in %s: %s\n", what, error.what());
  } catch (abi::__forced_unwind&) { // pthread_exit: Python ends threads this way if they want its lock after its end
    throw;
  } catch (...) {
    std::fprintf(stderr, "fog: exception of an unknown kind in %s\n", what);
  }
}

} // namespace fog
