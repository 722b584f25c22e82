// Which ranks share a host.
#pragma once

#include <string>
#include <vector>

#include "job/introduction.hpp"

namespace fog {

// A name for "can share memory and see each other's processes with this process": the same network, pid and
// shared-memory namespaces of a kernel. Host names are not enough (containers share them), and network namespaces count as hosts. Two
// hosts may have the same one: clones of a virtual machine that was running.
std::string host_id();

// The machine's name, for messages to people.
std::string host_name();

// That ranks with the same host_id() share a kernel has to be shown: each binds a Unix socket to a random name, which only its own kernel and
// network namespace know, and the others look whether they find it. The name is in the abstract namespace: it goes with its process, and no
// file has it.
class Beacon {
 public:
  Beacon();
  ~Beacon();
  Beacon(const Beacon&) = delete;
  Beacon& operator=(const Beacon&) = delete;

  // Empty if this system has no such sockets.
  const std::string& name() const {
    return name_;
  }
  // Whether there is a beacon of that name here.
  static bool is_here(const std::string& name);

 private:
  const int fd_;
  std::string name_;
};

// A name of rank `rank`'s host that no other host has, the same for all ranks on it: it is that of the lowest one that it finds there. Who is
// alone on its host, or whose system has no beacons, finds nobody but itself.
std::string find_host(const std::vector<Introduction>& ranks, int rank);

// What MPI is to take for hosts, see Runtime::nodes().
std::vector<int> number_nodes(std::vector<std::string> hosts, const std::vector<Introduction>& ranks);

// For tests: what host_id() returns from now on, where it is not empty.
void emulate_host(const std::string& host_id);

// Numbers hosts by first appearance: {"a","b","a"} -> {0,1,0}.
std::vector<int> number_hosts(const std::vector<std::string>& hosts);

// PMI's description of the layout, as runs of consecutive ranks: (vector,(host,1,ranks),...).
std::string process_mapping(const std::vector<int>& hosts);

} // namespace fog
