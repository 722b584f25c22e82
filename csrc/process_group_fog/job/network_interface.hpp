// Under which addresses the job's other hosts reach this one.
#pragma once

#include <string>
#include <vector>

namespace fog {

// Those of all interfaces that are up, IPv4 first, without loopback and link-local ones.
std::vector<std::string> own_addresses();

// The one address where this process is to listen for the job's others: that of the interface FOG_INTERFACE, or the one that it reaches
// `host` from, where the job's store is. If neither is known (the store is a file, say, or `host` is this machine's loopback),
// own_addresses().
std::vector<std::string> addresses_towards(const std::string& host);

// Throws ValueError if FOG_INTERFACE names no interface with an address.
void check_interface();

} // namespace fog
