#include "core/whole_seconds.hpp"

#include <cerrno>
#include <cstdlib>

#include <c10/util/Exception.h>

namespace fog {

std::chrono::seconds whole_seconds(const char* variable, long its_default, long least, long most) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') {
    return std::chrono::seconds(its_default);
  }
  char* end = nullptr;
  errno = 0;
  const long seconds = std::strtol(text, &end, 10);
  TORCH_CHECK_VALUE(
      errno == 0 && *end == '\0' && seconds >= least && seconds <= most, variable, ": got '", text,
      "'; allowed are whole seconds from ", least, " to ", most);
  return std::chrono::seconds(seconds);
}

} // namespace fog
