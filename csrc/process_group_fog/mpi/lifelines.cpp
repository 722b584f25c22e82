#include "lifelines.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>
#include <vector>

namespace fog::mpi {
namespace {

using Clock = std::chrono::steady_clock;

// Of a machine with more addresses only the first ones are tried.
constexpr size_t kMostAddresses = 8;

// Whoever has the higher rank connects, to all addresses at a time, and says who it is; the other one answers with one byte; and the first
// connection on which that comes is the one that is kept, which one byte more says.
struct Hello {
  uint64_t token;
  int64_t rank;
};

// A connection in the making.
struct Attempt {
  int fd;
  int peer; // -1: not known yet
  bool outgoing;
  bool connected;
  std::string received;
};

bool is_usable(const ifaddrs& interface) {
  return interface.ifa_addr != nullptr && interface.ifa_addr->sa_family == AF_INET && (interface.ifa_flags & IFF_UP) != 0 &&
      (interface.ifa_flags & IFF_LOOPBACK) == 0;
}

// So few bytes always fit.
bool put(int fd, const void* data, size_t bytes) {
  return ::send(fd, data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

} // namespace

Lifelines::Lifelines() : listener_(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
  sockaddr_in any = {};
  any.sin_family = AF_INET;
  if (listener_ >= 0 &&
      (bind(listener_, reinterpret_cast<sockaddr*>(&any), sizeof(any)) != 0 || listen(listener_, SOMAXCONN) != 0)) {
    close(std::exchange(listener_, -1));
  }
}

Lifelines::~Lifelines() {
  if (listener_ >= 0) {
    close(listener_);
  }
}

std::string Lifelines::address() const {
  sockaddr_in own = {};
  socklen_t length = sizeof(own);
  ifaddrs* interfaces = nullptr;
  if (listener_ < 0 || getsockname(listener_, reinterpret_cast<sockaddr*>(&own), &length) != 0 || getifaddrs(&interfaces) != 0) {
    return "";
  }
  std::ostringstream text;
  text << ntohs(own.sin_port);
  size_t count = 0;
  for (const auto* interface = interfaces; interface != nullptr && count < kMostAddresses; interface = interface->ifa_next) {
    if (is_usable(*interface)) {
      char name[INET_ADDRSTRLEN] = {};
      inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in*>(interface->ifa_addr)->sin_addr, name, sizeof(name));
      text << ' ' << name;
      ++count;
    }
  }
  freeifaddrs(interfaces);
  return count > 0 ? text.str() : "";
}

std::map<int, int> Lifelines::connect(
    int rank, const std::map<int, std::string>& addresses, uint64_t token, std::chrono::milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  std::vector<Attempt> attempts;
  for (const auto& [peer, text] : addresses) {
    std::istringstream words(text);
    int port = 0;
    words >> port;
    for (std::string name; peer < rank && words >> name;) {
      sockaddr_in to = {};
      to.sin_family = AF_INET;
      to.sin_port = htons(static_cast<uint16_t>(port));
      const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
      if (fd < 0 || inet_pton(AF_INET, name.c_str(), &to.sin_addr) != 1 ||
          (::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) != 0 && errno != EINPROGRESS)) {
        if (fd >= 0) {
          close(fd);
        }
        continue;
      }
      attempts.push_back({fd, peer, true, false, {}});
    }
  }
  std::map<int, int> made;
  const auto expected = static_cast<size_t>(
      std::count_if(addresses.begin(), addresses.end(), [](const auto& address) { return !address.second.empty(); }));
  // False once the attempt has come to its end.
  const auto advance = [&](Attempt& attempt) {
    if (attempt.outgoing && !attempt.connected) {
      const Hello hello{token, rank};
      attempt.connected = put(attempt.fd, &hello, sizeof(hello));
      return attempt.connected;
    }
    char bytes[sizeof(Hello) + 1];
    const auto count = recv(attempt.fd, bytes, sizeof(bytes), 0);
    if (count <= 0) {
      return count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    }
    attempt.received.append(bytes, static_cast<size_t>(count));
    if (attempt.outgoing) {
      if (made.count(attempt.peer) == 0 && put(attempt.fd, "k", 1)) {
        made.emplace(attempt.peer, std::exchange(attempt.fd, -1));
      }
      return false;
    }
    if (attempt.peer < 0 && attempt.received.size() >= sizeof(Hello)) {
      Hello hello = {};
      std::memcpy(&hello, attempt.received.data(), sizeof(hello));
      if (hello.token != token || addresses.count(static_cast<int>(hello.rank)) == 0 || !put(attempt.fd, "y", 1)) {
        return false;
      }
      attempt.peer = static_cast<int>(hello.rank);
    }
    if (attempt.received.size() > sizeof(Hello)) {
      made.emplace(attempt.peer, std::exchange(attempt.fd, -1));
      return false;
    }
    return true;
  };
  while (made.size() < expected && listener_ >= 0) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) {
      break;
    }
    std::vector<pollfd> polled = {{listener_, POLLIN, 0}};
    for (const auto& attempt : attempts) {
      polled.push_back({attempt.fd, static_cast<short>(attempt.outgoing && !attempt.connected ? POLLOUT : POLLIN), 0});
    }
    if (poll(polled.data(), polled.size(), static_cast<int>(left)) <= 0) {
      continue;
    }
    std::vector<Attempt> remaining;
    for (size_t i = 0; i < attempts.size(); ++i) {
      if (polled[i + 1].revents == 0 || advance(attempts[i])) {
        remaining.push_back(std::move(attempts[i]));
      } else if (attempts[i].fd >= 0) {
        close(attempts[i].fd);
      }
    }
    attempts = std::move(remaining);
    if ((polled[0].revents & POLLIN) != 0) {
      const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (fd >= 0) {
        attempts.push_back({fd, -1, false, true, {}});
      }
    }
  }
  for (const auto& attempt : attempts) {
    close(attempt.fd);
  }
  return made;
}

} // namespace fog::mpi
