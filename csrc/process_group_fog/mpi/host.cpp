#include "host.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <unordered_map>

namespace fog::mpi {
namespace {

std::string link_target(const char* path) {
  char target[256];
  const auto length = readlink(path, target, sizeof(target));
  return length < 0 ? std::string("?") : std::string(target, static_cast<size_t>(length));
}

} // namespace

std::string host_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat shm = {};
  stat("/dev/shm", &shm);
  std::ostringstream id;
  id << boot << '/' << link_target("/proc/self/ns/net") << '/' << link_target("/proc/self/ns/pid") << "/shm:" << shm.st_dev << ':'
     << shm.st_ino;
  if (boot.empty()) { // no /proc: the name is all there is
    id << '/' << host_name();
  }
  return id.str();
}

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  return name;
}

std::vector<int> number_hosts(const std::vector<std::string>& host_ids) {
  std::unordered_map<std::string, int> numbers;
  std::vector<int> hosts;
  hosts.reserve(host_ids.size());
  for (const auto& id : host_ids) {
    hosts.push_back(numbers.emplace(id, static_cast<int>(numbers.size())).first->second);
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

} // namespace fog::mpi
