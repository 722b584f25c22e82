// The addresses at which other hosts of the job reach this one.
#pragma once

#include <string>
#include <vector>

namespace fog {

// Returns the addresses of all interfaces that are up, IPv4 first, without loopback and link-local addresses.
std::vector<std::string> own_addresses();

// Returns the address at which this process listens for the other processes of its job: that of the interface in
// FOG_INTERFACE, or the local address on the route to `host`, the host of the job's store. If neither is known (the
// store is a file, or `host` is this machine's loopback), returns own_addresses().
std::vector<std::string> addresses_towards(const std::string& host);

// Throws ValueError if FOG_INTERFACE does not name an interface with an address.
void check_interface();

} // namespace fog
