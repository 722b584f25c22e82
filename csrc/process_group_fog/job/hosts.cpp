#include "job/hosts.hpp"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iomanip>
#include <random>
#include <sstream>
#include <unordered_map>

#include <c10/util/Exception.h>

#include "job/between_hosts.hpp"

namespace fog {
namespace {

std::string link_target(const char* path) {
  char target[256];
  const auto length = readlink(path, target, sizeof(target));
  return length < 0 ? std::string("?") : std::string(target, static_cast<size_t>(length));
}

std::string emulated_host_id;
std::string own_protocol;

// A Unix socket in the abstract namespace: a name that goes with its process, and that no file has.
class Beacon {
 public:
  Beacon() : fd_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    std::random_device device;
    std::ostringstream name;
    name << "fog-" << std::hex;
    for (int word = 0; word < 4; ++word) {
      name << std::setw(8) << std::setfill('0') << device();
    }
    if (const auto own = address(name.str()); fd_ >= 0 && bind(fd_, as_plain(own), length(name.str())) == 0) {
      name_ = name.str();
    }
  }
  ~Beacon() {
    if (fd_ >= 0) {
      close(fd_);
    }
  }
  Beacon(const Beacon&) = delete;
  Beacon& operator=(const Beacon&) = delete;

  // Empty if this system has no such sockets.
  const std::string& name() const {
    return name_;
  }

  // Whether there is a beacon of that name here.
  static bool is_here(const std::string& name) {
    const int fd = name.empty() || name.size() >= sizeof(sockaddr_un::sun_path) ? -1 : socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
      return false;
    }
    const auto there = address(name);
    const bool found = connect(fd, as_plain(there), length(name)) == 0;
    close(fd);
    return found;
  }

 private:
  static sockaddr_un address(const std::string& name) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    std::copy(name.begin(), name.end(), address.sun_path + 1); // behind a zero: the abstract namespace
    return address;
  }
  static const sockaddr* as_plain(const sockaddr_un& address) {
    return reinterpret_cast<const sockaddr*>(&address);
  }
  static socklen_t length(const std::string& name) {
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  }

  const int fd_;
  std::string name_;
};

// What a rank says of itself, in lines.
struct Introduction {
  std::string protocol;
  std::string host_id;
  std::string beacon;
  std::string between_hosts; // the setting
  std::string links; // "0" if it is without
};

Introduction read_introduction(const std::string& text) {
  std::istringstream lines(text);
  Introduction rank;
  std::getline(lines, rank.protocol);
  std::getline(lines, rank.host_id);
  std::getline(lines, rank.beacon);
  std::getline(lines, rank.between_hosts);
  std::getline(lines, rank.links);
  if (rank.beacon.empty() && rank.host_id.empty()) { // builds that had no protocol gave the host only
    rank.protocol = "a fog from before there was a protocol number";
  }
  return rank;
}

} // namespace

void set_protocol(const std::string& protocol) {
  own_protocol = protocol;
}

void emulate_host(const std::string& host_id) {
  emulated_host_id = host_id;
}

HostsOfRanks meet_on_hosts(Rendezvous& rendezvous) {
  const Beacon beacon; // until all have looked for it
  const auto id = host_id();
  std::vector<Introduction> ranks;
  const auto mine =
      own_protocol + '\n' + id + '\n' + beacon.name() + '\n' + name_of(between_hosts()) + '\n' + (has_local_links() ? "1" : "0");
  for (const auto& text : rendezvous.allgather("host", mine)) {
    ranks.push_back(read_introduction(text));
  }
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    TORCH_CHECK_WITH(
        DistBackendError, ranks[rank].protocol == ranks[0].protocol, "fog: two builds of fog in one job: rank 0 has ",
        ranks[0].protocol, ", rank ", rank, " has ", ranks[rank].protocol,
        ". Install the same fog, and the same torch, for all ranks.");
    TORCH_CHECK_WITH(
        DistBackendError, ranks[rank].between_hosts == ranks[0].between_hosts,
        "fog: ranks disagree on FOG_BETWEEN_HOSTS (or the option between_hosts): rank 0 has '", ranks[0].between_hosts, "', rank ",
        rank, " has '", ranks[rank].between_hosts, "'");
  }
  // Who is alone on its host, or whose system has no beacons, finds nobody but itself.
  std::string host = id + "#rank " + std::to_string(rendezvous.rank());
  for (int rank = 0; rank < rendezvous.rank(); ++rank) {
    const auto& other = ranks[static_cast<size_t>(rank)];
    if (other.host_id == id && Beacon::is_here(other.beacon)) {
      host = id + "#rank " + std::to_string(rank);
      break;
    }
  }
  HostsOfRanks found{rendezvous.allgather("host-found", host), {}};
  found.nodes = found.hosts;
  for (size_t rank = 0; rank < ranks.size() && between_hosts() == BetweenHosts::kRma; ++rank) {
    if (ranks[rank].links == "0") {
      found.nodes[rank] += "#alone " + std::to_string(rank);
    }
  }
  return found;
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
