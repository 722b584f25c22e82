// The data that ranks send each other when they meet to create a group, and the checks that they are compatible.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fog {

// Sets the string that must be the same in the builds of all ranks, see protocol(). Called once, before ranks meet.
void set_protocol(const std::string& protocol);

// Returns a name that no other job has.
std::string random_job_name();

struct PeerInformation {
  std::string protocol;
  std::string between_hosts; // the setting of the process
  // Why its host may have a fabric that does RMA: a device for it, or a variable by which the user tells MPI which one to
  // use. Empty if nothing says so.
  std::string fabric;
  std::string secret_mark; // shows whether two processes know the same secret; empty if it knows none yet
  std::string offered_secret; // of a process that knows none; rank 0's becomes the job's
  int max_ranks = 0; // its FOG_MAX_RANKS, or that of the job that it has joined; 0 if that is not set
  bool links = true; // false if it has no local links
  std::string job; // its world, and its rank there; empty if this is its first group
  int world_rank = -1;
  int pid = 0;
  std::string host_id;
  std::string host_name;
  std::string beacon;
  std::string host; // a name that only ranks there have; empty if it is not known
  bool shares_memory = false; // it is of a new world, and reaches all others through memory
  std::string address; // the address for the other ranks of its host
  std::string tcp; // where it listens for messages; told to processes that join
  uint64_t random = 0; // rank 0's number names the objects that ranks create
};

// Describes this process, without a world, a beacon and an address.
PeerInformation own_information();

std::string to_text(const PeerInformation& rank);
PeerInformation read_peer_information(const std::string& text);

// Throws DistBackendError if two ranks have different versions or settings. The error is the same on all ranks.
void check_alike(const std::vector<PeerInformation>& ranks);

// Throws DistBackendError if some ranks know another secret than others, or none. If none knows one, rank 0's offer
// becomes the secret of this process's job.
void settle_secret(const std::vector<PeerInformation>& ranks);

// Checks the versions only; `versions` has one description per rank.
void check_versions(const std::vector<std::string>& versions);

// Returns, for example, "MPICH 5.0.2" from the whole version text of an MPI library.
std::string short_version(const std::string& text);

} // namespace fog
