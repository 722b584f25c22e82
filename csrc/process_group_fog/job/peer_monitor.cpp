#include "job/peer_monitor.hpp"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include <c10/util/Logging.h>

#include "core/whole_seconds.hpp"
#include "job/network_interface.hpp"
#include "job/secret.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

// Addresses are tried in turn. An answer may take this long in the first round, and longer in each further round.
constexpr auto kFirstPatience = std::chrono::milliseconds(250);
constexpr size_t kRounds = 3;
// The number of seconds for which a host may be silent. The default is short enough to notice the loss before MPI's own
// connections do.
constexpr const char* kTimeoutVariable = "FOG_HOST_TIMEOUT";
constexpr int kHostTimeout = 11;
constexpr int kLeastTimeout = 4;
constexpr int kMostTimeout = 32767; // limit of the system's keep-alive probes

} // namespace

PeerMonitor::PeerMonitor() : epoll_fd_(epoll_create1(EPOLL_CLOEXEC)) {}

PeerMonitor::~PeerMonitor() {
  close_all();
  close(epoll_fd_);
}

int PeerMonitor::host_timeout() {
  return static_cast<int>(whole_seconds(kTimeoutVariable, kHostTimeout, kLeastTimeout, kMostTimeout).count());
}

std::string PeerMonitor::listen(const std::vector<std::string>& addresses) {
  if (listener_ < 0) {
    listener_ = listen_at(addresses);
    if (listener_ >= 0) {
      epoll_event event = {};
      event.events = EPOLLIN;
      epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, listener_, &event);
    }
  }
  if (nonce_.empty()) {
    nonce_ = random_secret();
  }
  const auto where = describe_listener(listener_, addresses);
  own_line_ = where.empty() ? "" : where + " nonce=" + nonce_;
  return own_line_;
}

void PeerMonitor::meet(int rank, int size, std::map<int, std::string> others, const std::vector<std::string>& reached) {
  rank_ = rank;
  size_ = size;
  host_timeout_ = host_timeout();
  own_ = own_addresses();
  others_ = std::move(others);
  reached_.insert(reached.begin(), reached.end());
}

void PeerMonitor::renew(int number, const std::string& line) {
  if (const auto found = peers_.find(number); found != peers_.end()) {
    for (auto* connection : {found->second.own, found->second.theirs}) {
      if (connection != nullptr) {
        drop(*connection);
      }
    }
    peers_.erase(found);
  }
  trying_.erase(std::remove(trying_.begin(), trying_.end(), number), trying_.end());
  ended_.erase(std::remove_if(ended_.begin(), ended_.end(), [&](const Ended& ended) { return ended.peer == number; }), ended_.end());
  expelled_by_.erase(std::remove(expelled_by_.begin(), expelled_by_.end(), number), expelled_by_.end());
  others_.erase(number);
  if (!line.empty()) {
    others_.emplace(number, line);
  }
}

void PeerMonitor::begin(int number) {
  const auto found = others_.find(number);
  if (found == others_.end() || found->second.empty()) {
    return;
  }
  auto& peer = peers_[number];
  if (peer.trying || peer.own != nullptr || peer.theirs != nullptr || peer.given_up || peer.ended) {
    return;
  }
  peer.places.clear();
  for (auto& address : read_listener(found->second, own_)) {
    peer.places.push_back({std::move(address)});
  }
  peer.began = Clock::now();
  peer.trying = true;
  trying_.push_back(number);
  try_next(number, peer);
}

bool PeerMonitor::is_settled(const Peer& peer) const {
  return peer.ended || peer.given_up || peer.theirs != nullptr || (peer.own != nullptr && peer.own->state != State::kConnecting);
}

bool PeerMonitor::may_send(int number) {
  auto found = peers_.find(number);
  if (found == peers_.end() || !is_settled(found->second)) {
    begin(number);
    found = peers_.find(number);
  }
  if (found == peers_.end() || is_settled(found->second)) {
    return true;
  }
  look();
  const auto& peer = found->second; // the reference stays valid in look()
  const auto known = [this](const Place& place) { return is_known(place); };
  return is_settled(peer) ||
      (std::none_of(peer.places.begin(), peer.places.end(), known) && Clock::now() >= peer.began + kFirstPatience);
}

std::vector<PeerMonitor::Ended> PeerMonitor::poll() {
  look();
  if (trying_.empty() && visitors_.empty()) {
    return std::exchange(ended_, {});
  }
  const auto now = Clock::now();
  for (size_t i = 0; i < trying_.size();) {
    const int number = trying_[i];
    auto& peer = peers_[number];
    const auto* own = peer.own;
    if (peer.ended || peer.given_up || (own == nullptr ? peer.theirs != nullptr : own->state == State::kMade)) {
      peer.trying = false;
      trying_[i] = trying_.back();
      trying_.pop_back();
      continue;
    }
    // Once it is connected, only the choice of another address justifies leaving it: a process that does not answer may
    // be stopped.
    const bool may_leave =
        own != nullptr && (own->state == State::kConnecting || (peer.places.size() > 1 && !is_known(peer.places.front())));
    if (own == nullptr && now >= peer.again) {
      try_next(number, peer);
    } else if (may_leave && now > own->limit) {
      on_try_over(number, peer);
    }
    ++i;
  }
  const auto visitors = visitors_;
  for (auto* visitor : visitors) {
    if (now > visitor->limit) {
      drop(*visitor);
    }
  }
  return std::exchange(ended_, {});
}

bool PeerMonitor::has_ended(int number) {
  look();
  const auto found = peers_.find(number);
  return found != peers_.end() && found->second.ended;
}

void PeerMonitor::close_all() {
  if (listener_ >= 0) {
    close(listener_);
  }
  for (auto* connection = connections_.load(); connection != nullptr; connection = connection->next) {
    if (const int fd = connection->fd; fd >= 0) {
      close(fd);
    }
  }
}

// Limits the number of connections, so that descriptors remain for the program's files. Those of visitors have a limit of
// their own: strangers must not keep this process from its peers.
bool PeerMonitor::has_too_many() const {
  return 2 * (storage_.size() - free_.size() - visitors_.size()) >= most_descriptors();
}

void PeerMonitor::try_next(int number, Peer& peer) {
  while (!peer.places.empty()) {
    auto& place = peer.places.front();
    if (!is_known(place) && place.tries >= kRounds) {
      peer.places.erase(peer.places.begin());
      continue;
    }
    errno = EMFILE;
    const int fd = has_too_many() ? -1 : begin_to_connect(place.address);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
      if (!std::exchange(told_of_limit_, true)) {
        LOG(WARNING) << "fog: world rank " << rank_ << ": the limit of open files (ulimit -n: " << most_descriptors()
                     << ") forbids a connection that would show the end of world rank " << number
                     << "; without it, the end is noticed at a timeout, or by the news of other ranks. Further cases are not reported.";
      }
      give_up(number, peer, "the limit of open files");
      return;
    }
    if (fd < 0) {
      if (!on_refused(number, peer, errno)) {
        return;
      }
      continue;
    }
    const auto now = Clock::now();
    auto limit = now + kFirstPatience * (1 << (2 * std::min(place.tries, kRounds - 1)));
    if (is_known(place)) { // wait no longer than a made connection would
      limit = std::max(std::min(limit, peer.began + std::chrono::seconds(host_timeout_)), now + kFirstPatience);
    }
    ++place.tries;
    keep_alive(fd, host_timeout_);
    peer.own = &take(fd, State::kConnecting, number);
    peer.own->limit = limit;
    watch(*peer.own, EPOLLOUT);
    return;
  }
  give_up(number, peer, "no process answers at its address");
}

bool PeerMonitor::on_refused(int number, Peer& peer, int error) {
  const auto& place = peer.places.front();
  const bool known = is_known(place);
  if (error == ECONNREFUSED && (known || place.cut > 0) && peer.theirs == nullptr) {
    end(number, peer, false, false);
    return false;
  }
  if (known && error != ECONNREFUSED) { // a network may fail for a moment
    const auto now = Clock::now();
    if (now < peer.began + std::chrono::seconds(host_timeout_)) {
      peer.again = now + kFirstPatience;
      std::rotate(peer.places.begin(), peer.places.begin() + 1, peer.places.end()); // another address may work
    } else {
      end(number, peer, true, false);
    }
    return false;
  }
  peer.places.erase(peer.places.begin());
  return true;
}

void PeerMonitor::on_try_over(int number, Peer& peer) {
  leave(*peer.own);
  if (is_known(peer.places.front()) && peer.theirs == nullptr && Clock::now() >= peer.began + std::chrono::seconds(host_timeout_)) {
    end(number, peer, true, false);
    return;
  }
  std::rotate(peer.places.begin(), peer.places.begin() + 1, peer.places.end());
  try_next(number, peer);
}

void PeerMonitor::end(int number, Peer& peer, bool silent, bool departed) {
  for (auto* connection : {peer.own, peer.theirs}) {
    if (connection != nullptr) {
      drop(*connection);
    }
  }
  peer.ended = true;
  peer.places = {};
  ended_.push_back({number, silent, departed});
  ++ends_;
}

void PeerMonitor::give_up(int number, Peer& peer, const char* why) {
  peer.given_up = true;
  peer.places = {};
  if (peer.theirs == nullptr) {
    LOG(INFO) << "fog: world rank " << rank_ << ": no connection that would show the end of world rank " << number << ": " << why;
  }
}

PeerMonitor::Connection& PeerMonitor::take(int fd, State state, int peer) {
  send_at_once(fd); // a rank that counts as lost must learn it before the data that were sent after
  if (free_.empty()) {
    auto& added = storage_.emplace_back();
    added.next = connections_.load();
    free_.reserve(storage_.size());
    free_.push_back(&added);
    connections_ = &added;
  }
  auto& connection = *free_.back();
  free_.pop_back();
  connection.state = state;
  connection.peer = peer;
  connection.departed = false;
  connection.received.clear();
  connection.greeting.clear();
  connection.fd = fd;
  return connection;
}

void PeerMonitor::drop(Connection& connection) {
  const int fd = connection.fd.exchange(-1);
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr); // explicitly, because a forked child may hold the same connection
  close(fd);
  if (connection.state == State::kVisitor) {
    visitors_.erase(std::find(visitors_.begin(), visitors_.end(), &connection));
    connection.received.clear();
  } else if (connection.state != State::kLeaving) {
    auto& peer = peers_[connection.peer];
    (peer.own == &connection ? peer.own : peer.theirs) = nullptr;
  }
  connection.state = State::kFree;
  free_.push_back(&connection);
}

void PeerMonitor::watch(Connection& connection, uint32_t events) const {
  epoll_event event = {};
  event.events = events;
  event.data.ptr = &connection;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, connection.fd, &event) != 0) {
    epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, connection.fd, &event);
  }
}

} // namespace fog
