// The user's choice of how data moves between hosts.
#pragma once

#include <string>

namespace fog {

enum class BetweenHosts {
  kAuto, // by TCP, and large data by MPI RMA if a fabric moves it without the target's help
  kTcp, // by fog's own connections, without MPI
  kRma, // large data by MPI RMA, or an error
};

// Returns "auto", "tcp" or "rma".
const char* name_of(BetweenHosts way);

// Takes the option of a group, or FOG_BETWEEN_HOSTS if the option is empty. The first group decides for the
// whole process. Throws ValueError for an unknown name, or for a name that differs from the first
// group's.
void choose_between_hosts(const std::string& option);

// Returns the choice of the first group, or that of the environment if there is no group yet.
BetweenHosts between_hosts();

// Returns why this host may have a fabric that does RMA: a device for it, or a variable by which the user tells MPI which
// one to use. Empty if nothing says so.
std::string fabric_hint();

} // namespace fog
