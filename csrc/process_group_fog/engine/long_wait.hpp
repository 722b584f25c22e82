#pragma once

#include <chrono>

namespace fog {

// After how long an operation that waits is warned of; 0: never. FOG_WARN_AFTER, in whole seconds. Throws ValueError where that is something else.
std::chrono::seconds long_wait();

} // namespace fog
