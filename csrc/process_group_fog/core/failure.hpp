// Failures, as the engine stores them and as error messages word them.
#pragma once

#include <cxxabi.h>

#include <cstddef>
#include <cstdio>
#include <exception>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace fog {

struct Failure {
  c10d::ErrorType type = c10d::ErrorType::SUCCESS;
  std::string reason; // empty if there is no failure
};

// The states of a process that is gone, as error messages word them.
inline constexpr const char* kEnded = "ended";
inline constexpr const char* kLost = "was lost: its process ended";
inline constexpr const char* kRefused = "was lost: its process ended (its port refuses connections)";
inline constexpr const char* kNoSign = "was lost: it shows no sign of life";
inline constexpr const char* kDestroyed = "has destroyed its group";
inline constexpr const char* kCut = "was lost: the connection to it has broken";
inline constexpr const char* kNotReached = "was lost: no connection to it could be made";
inline constexpr const char* kSilent = "was lost: its host does not answer";

// Returns a torch.distributed.DistBackendError. Throws std::bad_alloc if there is no memory for it.
std::exception_ptr backend_error(const std::string& text);

// Returns the text that came from another process. Python takes only UTF-8 as the text of an error, so bytes that are
// none, as where the sender has cut it, become question marks.
std::string text_from_peer(const char* data, size_t bytes);

// Returns the exception's text without the C++ backtrace that c10::Error::what() may add.
std::string message_of(const std::exception& error);

// Reports exceptions that no caller can receive.

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
