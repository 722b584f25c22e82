// Calls of MPI that all ranks make together, as it starts.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "core/deadline.hpp"

namespace fog {

// MPI's collective calls have no time-out. This one runs in a thread of its own, which is left behind if it does not return in
// time, so that the caller can give up and say why: it throws DistBackendError. `trouble` may end the wait early with its text; `excuse` says
// what a call that has not returned may be waiting for. Either may be null.
void call_in_time(
    const char* name,
    Deadline deadline,
    std::chrono::milliseconds timeout,
    const std::function<std::string()>& trouble,
    const std::function<std::string()>& excuse,
    std::function<int()> call);

} // namespace fog
