#include "job/peer_monitor.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

#include <c10/util/Exception.h>

#include "job/network_interface.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

// Of a machine with more addresses only the first ones are told.
constexpr size_t kMostAddresses = 8;
// One address after the other: how long an answer may take, at first and then, when all have been tried in vain, longer.
constexpr auto kFirstPatience = std::chrono::milliseconds(250);
constexpr size_t kRounds = 3;
constexpr auto kGivenUp = std::chrono::seconds(30);
// How long a host may be silent, in seconds: by default it is noticed before MPI's own connections notice it, which must not be first.
constexpr const char* kTimeoutVariable = "FOG_HOST_TIMEOUT";
constexpr int kHostTimeout = 11;
constexpr int kLeastTimeout = 4;
constexpr int kMostTimeout = 32767; // of the system's keep-alive probes
constexpr int kProbes = 3; // after a time without any
// At its end a process's descriptors are closed from the highest down (seen with Linux 6), so the news that it has ended is
// out before MPI's connections break. The table of descriptors should not become large for it.
constexpr rlim_t kHighDescriptor = 4096;

// What a descriptor in the epoll set is.
constexpr uint64_t kVisitor = 0;
constexpr uint64_t kLine = uint64_t(1) << 32;
constexpr uint64_t kListener = uint64_t(2) << 32;

// Whoever has the higher rank connects and says who it is and whom it means; the other one answers with a byte, and a byte
// more says that this connection is the one. From its answer on the other one does not close it: that would look like its end.
struct Hello {
  uint64_t token;
  int32_t from;
  int32_t to;
};
constexpr char kWelcome = 'y';
constexpr char kKept = 'k';
// What whoever ends in good order says on it at last.
constexpr char kGoodbye = 'g';

bool put(int fd, const void* data, size_t bytes) { // so few bytes always fit
  return ::send(fd, data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

// Connections must not take what the program may need for files.
bool is_too_many(int fd) {
  rlimit limit = {};
  return getrlimit(RLIMIT_NOFILE, &limit) == 0 && static_cast<rlim_t>(fd) >= limit.rlim_cur / 2;
}

int moved_up(int fd, int size) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
    return fd;
  }
  const auto top = std::min(limit.rlim_cur, kHighDescriptor);
  const auto room = static_cast<rlim_t>(size);
  const int high = top > 2 * room ? fcntl(fd, F_DUPFD_CLOEXEC, static_cast<int>(top - room)) : -1;
  if (high < 0) {
    return fd;
  }
  close(fd);
  return high;
}

void keep_alive(int fd, int seconds) {
  const int on = 1;
  const int interval = std::max(1, seconds * 2 / 11);
  const int idle = seconds - kProbes * interval;
  const unsigned milliseconds = 1000U * static_cast<unsigned>(seconds);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kProbes, sizeof(kProbes));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof(milliseconds));
}

// False if the text is no address in digits.
bool parse_address(const std::string& text, uint16_t port, sockaddr_storage* address, socklen_t* length) {
  *address = {};
  auto& four = reinterpret_cast<sockaddr_in&>(*address);
  auto& six = reinterpret_cast<sockaddr_in6&>(*address);
  if (inet_pton(AF_INET, text.c_str(), &four.sin_addr) == 1) {
    *length = sizeof(four);
    address->ss_family = AF_INET;
  } else if (inet_pton(AF_INET6, text.c_str(), &six.sin6_addr) == 1) {
    *length = sizeof(six);
    address->ss_family = AF_INET6;
  } else {
    return false;
  }
  four.sin_port = htons(port); // at the same place in both kinds
  return true;
}

// A socket that listens at `address`, or at all addresses of the machine if that is empty; -1 if there is none.
int listener_at(const std::string& address) {
  for (const char* all : {"::", "0.0.0.0"}) { // the first one serves both
    sockaddr_storage own = {};
    socklen_t length = 0;
    const int off = 0;
    const bool parsed = parse_address(address.empty() ? all : address, 0, &own, &length);
    const int fd = parsed ? socket(own.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0) : -1;
    if (fd >= 0 && (own.ss_family == AF_INET || setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off)) == 0) &&
        bind(fd, reinterpret_cast<sockaddr*>(&own), length) == 0 && ::listen(fd, SOMAXCONN) == 0) {
      return fd;
    }
    if (fd >= 0) {
      close(fd);
    }
  }
  return -1;
}

} // namespace

PeerMonitor::PeerMonitor() : epoll_fd_(epoll_create1(EPOLL_CLOEXEC)) {}

PeerMonitor::~PeerMonitor() {
  stop_listening();
  for (const auto& visitor : visitors_) {
    close(visitor.fd);
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (lines_[peer].fd >= 0) {
      close(lines_[peer].fd);
    }
  }
  close(epoll_fd_);
}

int PeerMonitor::host_timeout() {
  const char* text = std::getenv(kTimeoutVariable);
  if (text == nullptr || *text == '\0') {
    return kHostTimeout;
  }
  char* end = nullptr;
  const long seconds = std::strtol(text, &end, 10);
  TORCH_CHECK_VALUE(
      *end == '\0' && seconds >= kLeastTimeout && seconds <= kMostTimeout, kTimeoutVariable, ": got '", text,
      "'; allowed are whole seconds from ", kLeastTimeout, " to ", kMostTimeout);
  return static_cast<int>(seconds);
}

std::string PeerMonitor::listen(const std::vector<std::string>& addresses) {
  if (lines_ && listener_ < 0) {
    return "";
  }
  host_timeout_ = host_timeout();
  if (listener_ < 0) {
    listener_ = listener_at(addresses.size() == 1 ? addresses.front() : "");
    if (listener_ >= 0) {
      watch(listener_, kListener, EPOLLIN);
    }
  }
  sockaddr_storage own = {};
  socklen_t length = sizeof(own);
  if (listener_ < 0 || addresses.empty() || getsockname(listener_, reinterpret_cast<sockaddr*>(&own), &length) != 0) {
    stop_listening();
    return "";
  }
  std::ostringstream text; // the port is at the same place in both kinds of address
  text << ntohs(reinterpret_cast<const sockaddr_in&>(own).sin_port);
  for (size_t i = 0; i < std::min(addresses.size(), kMostAddresses); ++i) {
    text << ' ' << addresses[i];
  }
  return text.str();
}

void PeerMonitor::connect(int rank, int size, uint64_t token, const std::map<int, std::string>& addresses) {
  rank_ = rank;
  token_ = token;
  if (!lines_) {
    lines_ = std::make_unique<Line[]>(static_cast<size_t>(size));
    size_ = size;
  }
  ++making_; // this call itself, so that nothing is over before its end
  give_up_ = Clock::now() + kGivenUp;
  const auto own = own_addresses();
  for (const auto& [peer, text] : addresses) {
    auto& line = lines_[peer];
    if (text.empty() || line.state != State::kNone || (peer > rank && listener_ < 0)) {
      continue;
    }
    line.state = State::kAwaited;
    ++making_;
    if (peer > rank) {
      continue;
    }
    std::istringstream words(text);
    int port = 0;
    words >> port;
    for (std::string name; words >> name;) {
      if (std::find(own.begin(), own.end(), name) != own.end()) { // containers' bridges have the same one everywhere
        continue;
      }
      Address to = {};
      if (parse_address(name, static_cast<uint16_t>(port), &to.address, &to.length)) {
        line.addresses.push_back(to);
      }
    }
    try_next(peer, false);
  }
  end_making();
}

std::vector<int> PeerMonitor::missing() const {
  std::vector<int> peers;
  for (int peer = 0; peer < size_ && making_ > 0; ++peer) {
    if (in_making(lines_[peer].state)) {
      peers.push_back(peer);
    }
  }
  return peers;
}

void PeerMonitor::wait(Clock::time_point limit) const {
  const auto most = std::min<Clock::duration>(limit - Clock::now(), kFirstPatience / 4); // there are limits of tries as well
  pollfd polled = {epoll_fd_, POLLIN, 0};
  ::poll(&polled, 1, std::max(0, static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(most).count())));
}

std::vector<PeerMonitor::Ended> PeerMonitor::poll() {
  if (!lines_) {
    return {};
  }
  look();
  if (making_ > 0) {
    const auto now = Clock::now();
    for (int peer = 0; peer < size_; ++peer) {
      auto& line = lines_[peer];
      if (in_making(line.state) && now > give_up_) {
        give_up(peer);
      } else if ((line.state == State::kConnecting || line.state == State::kGreeting) && now > line.limit) {
        try_next(peer, false);
      }
    }
  }
  return std::exchange(ended_, {});
}

bool PeerMonitor::has_ended(int peer) {
  if (!lines_) {
    return false;
  }
  look();
  return lines_[peer].state == State::kEnded;
}

void PeerMonitor::say_goodbye() {
  for (int peer = 0; peer < size_; ++peer) {
    if (lines_[peer].state == State::kMade) {
      put(lines_[peer].fd, &kGoodbye, 1);
    }
  }
}

void PeerMonitor::close_in_child() {
  if (listener_ >= 0) {
    close(listener_);
  }
  for (int peer = 0; peer < size_; ++peer) {
    const int fd = lines_[peer].fd;
    if (fd >= 0) {
      close(fd);
    }
  }
}

void PeerMonitor::look() {
  std::array<epoll_event, 16> events;
  int count = 0;
  do {
    count = epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), 0);
    for (int i = 0; i < count; ++i) {
      const auto key = events[i].data.u64;
      if (key >= kListener) {
        accept_all();
      } else if (key >= kLine) {
        on_line(static_cast<int>(key - kLine));
      } else {
        on_visitor(static_cast<int>(key));
      }
    }
  } while (count == static_cast<int>(events.size()));
}

void PeerMonitor::accept_all() {
  for (;;) {
    const int fd = listener_ < 0 ? -1 : accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      return;
    }
    if (is_too_many(fd)) {
      close(fd);
      continue;
    }
    visitors_.push_back({fd, -1, {}});
    watch(fd, kVisitor + static_cast<uint64_t>(fd), EPOLLIN | EPOLLRDHUP);
  }
}

void PeerMonitor::on_visitor(int fd) {
  const auto visitor = std::find_if(visitors_.begin(), visitors_.end(), [fd](const Visitor& one) { return one.fd == fd; });
  if (visitor == visitors_.end()) { // closed by what came just before
    return;
  }
  std::array<char, sizeof(Hello) + 1> bytes;
  const auto count = recv(fd, bytes.data(), bytes.size() - visitor->received.size(), 0);
  bool stays = count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
  visitor->received.append(bytes.data(), static_cast<size_t>(std::max<ssize_t>(count, 0)));
  if (stays && visitor->peer < 0 && visitor->received.size() >= sizeof(Hello)) {
    Hello hello = {};
    std::memcpy(&hello, visitor->received.data(), sizeof(hello));
    stays = hello.token == token_ && hello.to == rank_ && hello.from > rank_ && hello.from < size_ &&
        lines_[hello.from].state == State::kAwaited && put(fd, &kWelcome, 1);
    visitor->peer = hello.from;
  }
  const bool kept = stays && visitor->received.size() > sizeof(Hello);
  if (kept) {
    const int peer = visitor->peer;
    visitors_.erase(visitor);
    adopt(peer, fd);
  } else if (!stays) {
    drop(fd);
    visitors_.erase(visitor);
  }
}

void PeerMonitor::on_line(int peer) {
  auto& line = lines_[peer];
  switch (line.state) {
    case State::kConnecting: {
      const Hello hello{token_, rank_, peer};
      if (!put(line.fd, &hello, sizeof(hello))) {
        try_next(peer, true);
        return;
      }
      line.state = State::kGreeting;
      watch(line.fd, kLine + static_cast<uint64_t>(peer), EPOLLIN | EPOLLRDHUP);
      return;
    }
    case State::kGreeting: {
      char answer = 0;
      const auto count = recv(line.fd, &answer, 1, 0);
      if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
        return;
      }
      if (count == 1 && answer == kWelcome && put(line.fd, &kKept, 1)) {
        adopt(peer, line.fd);
      } else {
        try_next(peer, true);
      }
      return;
    }
    case State::kMade: {
      char last = 0;
      const auto count = recv(line.fd, &last, 1, 0);
      line.departed = line.departed || (count == 1 && last == kGoodbye);
      if (count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR))) {
        return;
      }
      const bool silent = count < 0 && (errno == ETIMEDOUT || errno == EHOSTUNREACH || errno == ENETUNREACH);
      drop(line.fd.exchange(-1));
      line.state = State::kEnded;
      ended_.push_back({peer, silent, line.departed});
      ++ends_;
      return;
    }
    default: // of a descriptor closed since
      return;
  }
}

// `refused`: the address that was tried is not the peer's, or cannot be reached.
void PeerMonitor::try_next(int peer, bool refused) {
  auto& line = lines_[peer];
  auto& addresses = line.addresses;
  if (line.fd >= 0) {
    drop(line.fd.exchange(-1));
    if (refused) {
      addresses.erase(addresses.begin());
    } else {
      std::rotate(addresses.begin(), addresses.begin() + 1, addresses.end());
      ++line.tries;
    }
  }
  for (; !addresses.empty(); addresses.erase(addresses.begin())) {
    const auto round = line.tries / addresses.size();
    const auto& to = addresses.front();
    const int fd = round < kRounds ? socket(to.address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0) : -1;
    if (fd >= 0 && !is_too_many(fd) &&
        (::connect(fd, reinterpret_cast<const sockaddr*>(&to.address), to.length) == 0 || errno == EINPROGRESS)) {
      line.fd = fd;
      line.state = State::kConnecting;
      line.limit = Clock::now() + kFirstPatience * (1 << (2 * round));
      watch(fd, kLine + static_cast<uint64_t>(peer), EPOLLOUT);
      return;
    }
    if (fd >= 0) {
      close(fd);
    }
  }
  give_up(peer);
}

// The connection is the one.
void PeerMonitor::adopt(int peer, int fd) {
  auto& line = lines_[peer];
  const bool was_in_making = in_making(line.state); // it may have been given up
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
  const int high = moved_up(fd, size_);
  keep_alive(high, host_timeout_);
  line.fd = high;
  line.state = State::kMade;
  line.addresses = {};
  watch(high, kLine + static_cast<uint64_t>(peer), EPOLLIN | EPOLLRDHUP);
  if (was_in_making) {
    end_making();
  }
}

void PeerMonitor::give_up(int peer) {
  auto& line = lines_[peer];
  if (line.fd >= 0) {
    drop(line.fd.exchange(-1));
  }
  line.state = State::kNone;
  line.addresses = {};
  end_making();
}

void PeerMonitor::end_making() {
  if (--making_ == 0) {
    stop_listening();
  }
}

// Visitors that were answered keep their connection until they close it.
void PeerMonitor::stop_listening() {
  if (const int fd = listener_.exchange(-1); fd >= 0) {
    drop(fd);
  }
  visitors_.remove_if([this](const Visitor& visitor) {
    if (visitor.peer < 0) {
      drop(visitor.fd);
    }
    return visitor.peer < 0;
  });
}

void PeerMonitor::watch(int fd, uint64_t key, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = key;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, fd, &event);
  }
}

// Explicitly out of the set, too: a forked child may hold the same connection.
void PeerMonitor::drop(int fd) {
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr);
  close(fd);
}

} // namespace fog
