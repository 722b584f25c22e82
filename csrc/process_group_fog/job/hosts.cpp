#include "job/hosts.hpp"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <unordered_map>

#include <c10/util/Exception.h>

#include "core/settings.hpp"
#include "job/secret.hpp"

namespace fog {
namespace {

std::string link_target(const char* path) {
  char target[256];
  const auto length = readlink(path, target, sizeof(target));
  return length < 0 ? std::string("?") : std::string(target, static_cast<size_t>(length));
}

std::string emulated_host_id;

sockaddr_un address_of(const std::string& name) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), address.sun_path + 1); // a leading zero selects the abstract namespace
  return address;
}

const sockaddr* as_plain(const sockaddr_un& address) {
  return reinterpret_cast<const sockaddr*>(&address);
}

socklen_t length_with(const std::string& name) {
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

} // namespace

Beacon::Beacon() : socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
  const auto name = "fog-" + random_digits(32);
  if (const auto own = address_of(name); socket_.fd() >= 0 && bind(socket_.fd(), as_plain(own), length_with(name)) == 0) {
    name_ = name;
  }
}

bool Beacon::is_here(const std::string& name) {
  if (name.empty() || name.size() >= sizeof(sockaddr_un::sun_path)) {
    return false;
  }
  const OwnedSocket socket_here(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const auto there = address_of(name);
  return socket_here.fd() >= 0 && connect(socket_here.fd(), as_plain(there), length_with(name)) == 0;
}

void emulate_host(const std::string& host_id) {
  emulated_host_id = host_id;
}

std::string find_host(const std::vector<PeerInformation>& ranks, int rank) {
  const auto& id = ranks[static_cast<size_t>(rank)].host_id;
  int first = 0;
  while (first < rank &&
         (ranks[static_cast<size_t>(first)].host_id != id || !Beacon::is_here(ranks[static_cast<size_t>(first)].beacon))) {
    ++first;
  }
  return id + "#rank " + std::to_string(first);
}

std::vector<int> number_nodes(std::vector<std::string> hosts, const std::vector<PeerInformation>& ranks) {
  for (size_t rank = 0; rank < ranks.size() && settings().between_hosts == "rma"; ++rank) {
    if (!ranks[rank].links) {
      hosts[rank] += "#alone " + std::to_string(rank);
    }
  }
  return number_hosts(hosts);
}

std::string host_id() {
  if (!emulated_host_id.empty()) {
    return emulated_host_id;
  }
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat shm = {};
  stat("/dev/shm", &shm);
  std::ostringstream id;
  id << boot << '/' << link_target("/proc/self/ns/net") << '/' << link_target("/proc/self/ns/pid") << "/shm:" << shm.st_dev << ':'
     << shm.st_ino;
  if (boot.empty()) { // without /proc only the name is known
    id << '/' << host_name();
  }
  return id.str();
}

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::vector<int> number_hosts(const std::vector<std::string>& names) {
  std::unordered_map<std::string, int> numbers;
  std::vector<int> hosts;
  hosts.reserve(names.size());
  for (const auto& name : names) {
    hosts.push_back(numbers.emplace(name, static_cast<int>(numbers.size())).first->second);
  }
  return hosts;
}

std::string process_mapping(const std::vector<int>& hosts) {
  std::ostringstream mapping;
  mapping << "(vector";
  for (size_t first = 0; first < hosts.size();) {
    size_t last = first;
    while (last < hosts.size() && hosts[last] == hosts[first]) {
      ++last;
    }
    mapping << ",(" << hosts[first] << ",1," << last - first << ")";
    first = last;
  }
  mapping << ")";
  return mapping.str();
}

} // namespace fog
