// What ranks tell each other of themselves when they meet to make a group, and what they must have alike.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fog {

// What this build must have in common with those of all other ranks, see protocol(). Set once, before ranks meet.
void set_protocol(const std::string& protocol);

// A name that no other job has.
std::string random_job_name();

struct Introduction {
  std::string protocol;
  std::string between_hosts; // the setting
  std::string reduce; // that of the group, see SumsBy
  bool links = true; // false if it is without
  bool launched = false; // a launcher has started it, with this group as its world
  std::string job; // its world, and its rank there; empty if this is its first group
  int world_rank = -1;
  int pid = 0;
  std::string host_id;
  std::string host_name;
  std::string beacon;
  std::string host; // see meet_on_hosts(); empty if it has not been found
  std::string address; // where ranks of its host reach it
  uint64_t random = 0; // rank 0's names what is made
};

// This process as one that has no world yet; without a beacon and an address.
Introduction introduce();

std::string to_text(const Introduction& rank);
Introduction read_introduction(const std::string& text);

// Throws DistBackendError, the same on all ranks, if two of them have other versions or settings.
void check_alike(const std::vector<Introduction>& ranks);

// The same of versions alone, each rank's in words.
void check_versions(const std::vector<std::string>& versions);

// "MPICH 5.0.2", of all that an MPI library says of itself.
std::string short_version(const std::string& text);

} // namespace fog
