// The user's choice of how data moves between hosts, and of the library that computes sums there.
#pragma once

#include <cstddef>
#include <string>

namespace fog {

enum class BetweenHosts {
  kAuto, // one-sidedly if the fabric moves data without the target's help, otherwise by messages
  kRma,
  kMessages,
  kTcp, // by fog's own connections, without MPI
};

// Returns "auto", "rma", "messages" or "tcp".
const char* name_of(BetweenHosts way);

// Takes the option of a group, or FOG_BETWEEN_HOSTS if the option is empty, or kAuto if both are. The first group
// decides for the whole process. Throws ValueError for an unknown name, or for a name that differs from the first
// group's.
void choose_between_hosts(const std::string& option);

// Returns the choice of the first group, or that of the environment if there is no group yet.
BetweenHosts between_hosts();

// The library that computes allreduce, reduce and reduce_scatter of a group with ranks on several hosts.
enum class SumsBy {
  kFog,
  kMpi, // MPI's nonblocking reductions, if MPI supports the dtype and the reduction
};

// Returns "fog" or "mpi".
const char* name_of(SumsBy sums);

// Returns the option of a group, or FOG_REDUCE if the option is empty, or kFog if both are. Throws ValueError for an
// unknown name, and for kMpi if this process does not use MPI.
SumsBy sums_by(const std::string& option);

// Returns the number of bytes of this process that others can access one-sidedly: FOG_RMA_BYTES, or 256 MiB. Throws
// ValueError if the variable is not such a number.
size_t rma_bytes();

// Returns false with FOG_LOCAL_LINKS=0: ranks of one host then reach this one as if they were on other hosts.
bool has_local_links();

} // namespace fog
