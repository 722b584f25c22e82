#pragma once

#include <chrono>

namespace fog {

// Returns after which time a waiting operation is warned about, from FOG_WARN_AFTER in whole seconds; 0 means never.
// Throws ValueError if the value is malformed.
std::chrono::seconds long_wait();

} // namespace fog
