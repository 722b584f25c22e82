// Which ranks share a host.
#pragma once

#include <string>
#include <vector>

#include "job/rendezvous.hpp"

namespace fog {

// A name for "can share memory and see each other's processes with this process": the same network, pid and
// shared-memory namespaces of a kernel. Host names are not enough (containers share them), and network namespaces count as hosts. Two
// hosts may have the same one: clones of a virtual machine that was running.
std::string host_id();

// The machine's name, for messages to people.
std::string host_name();

// Of each rank a name of its host that no other host has, the same for all ranks on it. All ranks of the rendezvous call it; it throws
// DistBackendError on all of them if one runs another build of fog, see set_protocol().
//
// That ranks with the same host_id() share a kernel has to be shown: each binds a Unix socket to a random name, which only its own kernel and
// network namespace know, and finds the one of the lowest rank that it can reach.
//
// It throws as well if ranks want different ways between hosts, see between_hosts().
struct HostsOfRanks {
  std::vector<std::string> hosts;
  std::vector<std::string> nodes; // what MPI is to take for hosts
};
HostsOfRanks meet_on_hosts(Rendezvous& rendezvous);

// What this build must have in common with those of all other ranks, see protocol(). Set once, before ranks meet.
void set_protocol(const std::string& protocol);

// For tests: what host_id() returns from now on, where it is not empty.
void emulate_host(const std::string& host_id);

// Numbers hosts by first appearance: {"a","b","a"} -> {0,1,0}.
std::vector<int> number_hosts(const std::vector<std::string>& hosts);

// PMI's description of the layout, as runs of consecutive ranks: (vector,(host,1,ranks),...).
std::string process_mapping(const std::vector<int>& hosts);

} // namespace fog
