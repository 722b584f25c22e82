#include "job/network_interface.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <memory>

#include <c10/util/Exception.h>

#include "core/settings.hpp"

namespace fog {
namespace {

// Returns the address in digits; empty if other hosts cannot use it.
std::string text_of(const sockaddr* address) {
  const void* number = nullptr;
  if (address != nullptr && address->sa_family == AF_INET) {
    number = &reinterpret_cast<const sockaddr_in*>(address)->sin_addr;
  } else if (address != nullptr && address->sa_family == AF_INET6) {
    const auto& own = reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
    if (!IN6_IS_ADDR_LINKLOCAL(&own)) { // a link-local address needs the other side's name of the interface
      number = &own;
    }
  }
  std::array<char, INET6_ADDRSTRLEN> text = {};
  return number != nullptr && inet_ntop(address->sa_family, number, text.data(), text.size()) != nullptr ? text.data() : "";
}

// Returns the addresses of the named interface, or of all interfaces except loopback if the name is empty.
std::vector<std::string> addresses_of(const std::string& name) {
  ifaddrs* interfaces = nullptr;
  if (getifaddrs(&interfaces) != 0) {
    return {};
  }
  constexpr unsigned kUp = IFF_UP | IFF_RUNNING;
  std::vector<std::string> addresses;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const auto* interface = interfaces; interface != nullptr; interface = interface->ifa_next) {
      const bool wanted = name.empty() ? (interface->ifa_flags & IFF_LOOPBACK) == 0 : name == interface->ifa_name;
      if (wanted && interface->ifa_addr != nullptr && interface->ifa_addr->sa_family == family && (interface->ifa_flags & kUp) == kUp) {
        if (auto text = text_of(interface->ifa_addr); !text.empty()) {
          addresses.push_back(std::move(text));
        }
      }
    }
  }
  freeifaddrs(interfaces);
  return addresses;
}

// Returns this machine's address on the route to `host`. It asks the routing table and sends nothing.
std::string source_address(const std::string& host) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (host.empty() || getaddrinfo(host.c_str(), "1", &hints, &found) != 0) {
    return "";
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  for (const auto* to = found; to != nullptr; to = to->ai_next) {
    const int fd = socket(to->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_storage own = {};
    socklen_t length = sizeof(own);
    auto* address = reinterpret_cast<sockaddr*>(&own);
    const bool known = fd >= 0 && ::connect(fd, to->ai_addr, to->ai_addrlen) == 0 && getsockname(fd, address, &length) == 0;
    if (fd >= 0) {
      close(fd);
    }
    if (known) {
      return text_of(address);
    }
  }
  return "";
}

} // namespace

std::vector<std::string> own_addresses() {
  return addresses_of("");
}

std::vector<std::string> addresses_towards(const std::string& host) {
  if (const auto name = settings().interface; !name.empty()) {
    auto addresses = addresses_of(name);
    addresses.resize(std::min<size_t>(addresses.size(), 1));
    return addresses;
  }
  auto own = own_addresses();
  const auto source = source_address(host);
  for (const auto& address : own) { // this excludes loopback addresses
    if (address == source) {
      return {address};
    }
  }
  return own;
}

void check_interface() {
  const auto name = settings().interface;
  TORCH_CHECK_VALUE(
      name.empty() || !addresses_of(name).empty(), "FOG_INTERFACE: got '", name,
      "'; allowed is the name of a network interface that is up and has an address ('ip address' lists them)");
}

} // namespace fog
