#include "core/failure.hpp"

#include <new>

#include <c10/util/Exception.h>

namespace fog {

std::exception_ptr backend_error(const std::string& text) {
  try {
    C10_THROW_ERROR(DistBackendError, text);
  } catch (const std::bad_alloc&) { // not the requested error; the caller may try again
    throw;
  } catch (...) {
    return std::current_exception();
  }
}

std::string message_of(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  return c10_error != nullptr ? c10_error->what_without_backtrace() : error.what();
}

} // namespace fog
