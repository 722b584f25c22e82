// How a process that is no member of the job yet calls for the attention of one that is, at the address where that one
// listens for messages.
#pragma once

#include <chrono>
#include <string>

namespace fog::tcp {

// Calls world rank `to`, which listens at `line`, from any thread. Both sides prove that they know the job's secret.
// Returns whether it has heard the call: false if nobody answers within `timeout`, or somebody else does.
bool call_to_join(const std::string& line, int to, std::chrono::milliseconds timeout);

} // namespace fog::tcp
