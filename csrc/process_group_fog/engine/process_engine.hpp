// The engine of this process, over shared memory, TCP and MPI, for all its groups.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "engine/engine.hpp"

namespace fog {

class ProcessTransport;
namespace shared_memory {
class Links;
}
namespace mpi {
class RemoteMemory;
}
namespace tcp {
class Connections;
}

// Lives until the process ends, as MPI does.
Engine& process_engine();
// The engine's transport; null before the first group of several ranks.
ProcessTransport* process_transport();
// The TCP connections of the transport, or of the one that is being created; null without. A forked child closes their
// sockets.
tcp::Connections* process_connections();
void use_sockets(tcp::Connections* its_connections);
// Makes it. `remote_memory` may be null.
void make_process_transport(
    std::unique_ptr<shared_memory::Links> links,
    std::unique_ptr<tcp::Connections> its_connections,
    std::unique_ptr<mpi::RemoteMemory> remote_memory);

// Applies the settings, before the first group. Throws ValueError for an interface that is not there.
void use_settings();

// An older group that contains all members of a new one, and their ranks in it; null if there is none.
struct PriorGroup {
  std::shared_ptr<Group> group;
  std::vector<int> ranks;
};

// Creates a group of the ranks that meet at `store`, and starts MPI with the first group if it is to move data. Blocks until
// every rank has come; throws DistBackendError with the missing ranks after `timeout`, or as soon as one of them is known
// to be gone.
std::shared_ptr<Group> connect(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    std::chrono::milliseconds timeout,
    const std::string& name,
    const PriorGroup& prior);

// Sets the rank and size that observers of this process see, and starts the timeline if FOG_TIMELINE is set. Only the
// first call has an effect; connect() calls it if it was not called before.
void observe_as(int rank, int size, const std::string& script = "");

// Records this process's operations in the file `prefix` + rank + ".json", see Timeline::start(). With FOG_TIMELINE,
// recording starts with the first group.
void start_timeline(const std::string& prefix, int rank, int size);
// Ends the recording, if there is one.
void stop_timeline();

// Says goodbye to the other ranks and ends MPI. For interpreter exit.
void leave_job();

} // namespace fog
