// Calls of MPI that all ranks make together at its start.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "core/deadline.hpp"

namespace fog {

// MPI's collective calls have no time-out. This function makes the call in a separate thread. If the call does not
// return in time, the function leaves the thread behind and throws DistBackendError. `trouble` may end the wait early
// by returning a text; `excuse` describes the possible reasons for a call that has not returned. Either may be null.
void call_in_time(
    const char* name,
    Deadline deadline,
    std::chrono::milliseconds timeout,
    const std::function<std::string()>& trouble,
    const std::function<std::string()>& excuse,
    std::function<int()> call);

} // namespace fog
