// Which ranks share a host.
#pragma once

#include <string>
#include <vector>

namespace fog::mpi {

// A name for "can share memory and see each other's processes with this process": the same kernel, network, pid and
// shared-memory namespaces. Host names are not enough (containers share them), and network namespaces count as hosts.
std::string host_id();

// The machine's name, for messages to people.
std::string host_name();

// Numbers hosts by first appearance: {"a","b","a"} -> {0,1,0}.
std::vector<int> number_hosts(const std::vector<std::string>& host_ids);

// PMI's description of the layout, as runs of consecutive ranks: (vector,(host,1,ranks),...).
std::string process_mapping(const std::vector<int>& hosts);

} // namespace fog::mpi
