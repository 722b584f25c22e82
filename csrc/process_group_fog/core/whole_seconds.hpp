// Environment variables whose values are whole seconds.
#pragma once

#include <chrono>

namespace fog {

// Returns the variable's value, or `its_default` if it is not set or empty. Throws ValueError unless the value is a
// whole number from `least` to `most`.
std::chrono::seconds whole_seconds(const char* variable, long its_default, long least, long most);

} // namespace fog
