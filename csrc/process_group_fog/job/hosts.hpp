// Finds out which ranks share a host.
#pragma once

#include <string>
#include <vector>

#include "job/peer_information.hpp"
#include "job/peer_sockets.hpp"

namespace fog {

// Returns an identifier of the set of processes that can share memory with this one and see its process: those in the
// same network, pid and shared-memory namespaces of one kernel. Host names do not suffice because containers share
// them; each network namespace counts as a host. Two hosts may have the same identifier, for example clones of a
// running virtual machine.
std::string host_id();

// Returns the machine's name, for messages.
std::string host_name();

// Proves that ranks with the same host_id() share a kernel: each rank binds a Unix socket to a random name, which only
// its own kernel and network namespace know, and the other ranks look for that name. The name is in the abstract
// namespace, so it has no file and disappears with its process.
class Beacon {
 public:
  Beacon();

  // Empty if this system has no such sockets.
  const std::string& name() const {
    return name_;
  }
  // Returns whether a beacon with this name exists on this host.
  static bool is_here(const std::string& name);

 private:
  const OwnedSocket socket_;
  std::string name_;
};

// Returns a name for the host of rank `rank` that all its ranks have in common and no other host has: it contains the
// lowest rank whose beacon is found there. A rank that is alone on its host, or whose system has no beacons, finds only
// itself.
std::string find_host(const std::vector<PeerInformation>& ranks, int rank);

// Returns the division into nodes that MPI is told, see Runtime::nodes().
std::vector<int> number_nodes(std::vector<std::string> hosts, const std::vector<PeerInformation>& ranks);

// For tests: makes host_id() return this value from now on, unless it is empty.
void emulate_host(const std::string& host_id);

// Numbers the hosts by first appearance: {"a","b","a"} -> {0,1,0}.
std::vector<int> number_hosts(const std::vector<std::string>& hosts);

// Returns PMI's description of the layout, as runs of consecutive ranks: (vector,(host,1,ranks),...).
std::string process_mapping(const std::vector<int>& hosts);

} // namespace fog
