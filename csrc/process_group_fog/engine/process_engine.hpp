// The engine of this process: over MPI and shared memory, for all its groups.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "engine/engine.hpp"
#include "job/between_hosts.hpp"

namespace fog {

// Lives until the process ends, as MPI does.
Engine& process_engine();

// Makes a group of the ranks that meet at `store`, and starts MPI in the first one. Blocks until every rank has come; throws
// DistBackendError naming those that do not within `timeout`. `sums`: who does allreduce, reduce and reduce_scatter between hosts.
std::shared_ptr<Group> connect(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    std::chrono::milliseconds timeout,
    const std::string& name,
    SumsBy sums);

// This process is this rank of so many, for those who look at it from outside; begins what FOG_TIMELINE asks for. The first call counts, and
// connect() makes it if nobody else has.
void observe_as(int rank, int size);

// Records this process's operations in the file `prefix` + rank + ".json", see Timeline::start(). FOG_TIMELINE does so from the first group on.
void start_timeline(const std::string& prefix, int rank, int size);
// Ends that; does nothing without a timeline.
void stop_timeline();

// Takes leave of the other ranks and ends MPI. For interpreter exit.
void leave_job();

} // namespace fog
