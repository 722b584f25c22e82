#include "job/peer_sockets.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <sstream>

#include "job/network_interface.hpp"

namespace fog {
namespace {

// A machine with more addresses tells only the first ones.
constexpr size_t kMostAddresses = 8;
// Number of the system's keep-alive probes after a time of silence, where that has so many seconds. A cut that is shorter
// than all of them ends no connection.
constexpr int kProbes = 9;
// Limit of moved descriptors, to keep the descriptor table small.
constexpr rlim_t kHighDescriptor = 4096;

// Returns false if the text is not an address in digits.
bool parse_address(const std::string& text, uint16_t port, PeerAddress* result) {
  *result = {};
  result->text = text;
  auto& four = reinterpret_cast<sockaddr_in&>(result->address);
  auto& six = reinterpret_cast<sockaddr_in6&>(result->address);
  if (inet_pton(AF_INET, text.c_str(), &four.sin_addr) == 1) {
    result->length = sizeof(four);
    result->address.ss_family = AF_INET;
  } else if (inet_pton(AF_INET6, text.c_str(), &six.sin6_addr) == 1) {
    result->length = sizeof(six);
    result->address.ss_family = AF_INET6;
  } else {
    return false;
  }
  four.sin_port = htons(port); // the port has the same offset in both kinds of address
  return true;
}

} // namespace

int listen_at(const std::vector<std::string>& addresses) {
  for (const char* all : {"::", "0.0.0.0"}) { // the first one serves both
    PeerAddress own;
    const int off = 0;
    const bool parsed = parse_address(addresses.size() == 1 ? addresses.front() : all, 0, &own);
    const int fd = parsed ? socket(own.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0) : -1;
    if (fd >= 0 && (own.address.ss_family == AF_INET || setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off)) == 0) &&
        bind(fd, reinterpret_cast<sockaddr*>(&own.address), own.length) == 0 && ::listen(fd, SOMAXCONN) == 0) {
      return fd;
    }
    if (fd >= 0) {
      close(fd);
    }
  }
  return -1;
}

std::string describe_listener(int fd, const std::vector<std::string>& addresses) {
  sockaddr_storage own = {};
  socklen_t length = sizeof(own);
  if (fd < 0 || addresses.empty() || getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) != 0) {
    return "";
  }
  std::ostringstream text; // the port has the same offset in both kinds of address
  text << ntohs(reinterpret_cast<const sockaddr_in&>(own).sin_port);
  for (size_t i = 0; i < std::min(addresses.size(), kMostAddresses); ++i) {
    text << ' ' << addresses[i];
  }
  return text.str();
}

std::vector<PeerAddress> read_listener(const std::string& line, const std::vector<std::string>& own) {
  std::vector<PeerAddress> addresses;
  std::istringstream words(line);
  int port = 0;
  words >> port;
  for (std::string name; words >> name;) {
    PeerAddress to;
    if (std::find(own.begin(), own.end(), name) == own.end() && parse_address(name, static_cast<uint16_t>(port), &to)) {
      addresses.push_back(std::move(to));
    }
  }
  return addresses;
}

int begin_to_connect(const PeerAddress& to) {
  const int fd = socket(to.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd >= 0 && ::connect(fd, reinterpret_cast<const sockaddr*>(&to.address), to.length) != 0 && errno != EINPROGRESS) {
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
  }
  return fd;
}

OwnedSocket::~OwnedSocket() {
  if (fd_ >= 0) {
    close(fd_);
  }
}

bool OwnedSocket::await(short events, std::chrono::steady_clock::time_point limit) const {
  while (true) {
    pollfd polled = {fd_, events, 0};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(limit - std::chrono::steady_clock::now()).count();
    const int ready = ::poll(&polled, 1, static_cast<int>(std::clamp<int64_t>(left, 0, INT_MAX)));
    if (ready >= 0 || errno != EINTR) {
      return ready > 0;
    }
  }
}

int error_of_socket(int fd) {
  int error = 0;
  socklen_t length = sizeof(error);
  return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

rlim_t most_descriptors() {
  rlimit limit = {};
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

int moved_up(int fd, int size) {
  const auto top = std::min(most_descriptors(), kHighDescriptor);
  const auto room = std::min(static_cast<rlim_t>(size), top / 4);
  const int high = fcntl(fd, F_DUPFD_CLOEXEC, static_cast<int>(top - room));
  if (high < 0) {
    return fd;
  }
  close(fd);
  return high;
}

void keep_alive(int fd, int seconds) {
  const int on = 1;
  const int interval = std::max(1, seconds / 11);
  const int probes = std::min(kProbes, seconds - 1);
  const int idle = seconds - probes * interval;
  const unsigned milliseconds = 1000U * static_cast<unsigned>(seconds);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof(milliseconds));
}

void send_at_once(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

bool is_silent(int fd, int seconds) {
  // The host answers each segment and each probe of a receiver's closed window, also for a process that is stopped.
  constexpr int kUnanswered = 2;
  tcp_info info = {};
  socklen_t length = sizeof(info);
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 &&
      std::max(info.tcpi_retransmits, info.tcpi_probes) >= kUnanswered &&
      info.tcpi_last_ack_recv >= 1000U * static_cast<unsigned>(seconds);
}

} // namespace fog
