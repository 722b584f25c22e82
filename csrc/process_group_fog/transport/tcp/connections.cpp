#include "transport/tcp/connections.hpp"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <system_error>
#include <utility>

#include <c10/util/Logging.h>
#include <c10/util/thread_name.h>

#include "core/failure.hpp"
#include "core/settings.hpp"
#include "job/network_interface.hpp"

namespace fog::tcp {
namespace {

// Whoever connects must prove within this time who it is.
constexpr auto kPatience = std::chrono::seconds(5);
// An address may take this long to answer in the first round, and longer in each further round.
constexpr auto kFirstPatience = std::chrono::milliseconds(250);
constexpr size_t kLongestRound = 3;
// Between an attempt that has failed and the next one; twice as long after each round, up to 128 ms.
constexpr auto kPause = std::chrono::milliseconds(2);
constexpr size_t kLongestPause = 6; // rounds
constexpr auto kLookInterval = std::chrono::milliseconds(2);
// The accepted sockets whose other side has not proved who it is, and at most an eighth of the descriptors; the oldest gives way.
constexpr rlim_t kMostUnproven = 256;
// How long it may take to find out why a connection has ended. Then its process may still run, but messages may be lost,
// so it counts as lost.
constexpr auto kDoubt = std::chrono::milliseconds(500);
// Between two looks for hosts that are silent.
constexpr auto kSilenceInterval = std::chrono::milliseconds(250);

// The error of a connection on which nothing has come for too long.
bool is_silence(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
}

// Round trips up to this time, in microseconds, are those of one site.
constexpr uint32_t kNear = 5000;
// From this time on, data does not wait for an answer of the receiver.
constexpr uint32_t kFar = 1000;

// Data goes to one peer and then to another, so a connection pauses, and shares its link for some of the time. BBR, which
// some systems use, sends at the rate that it has seen last, and takes tens of round trips to find a higher one: on slow
// links a quarter of the time was lost. It is for paths that are long and lose packets, so only these keep it. Reno is the
// one that no system forbids; on short paths it is as good as Cubic. Returns false if the path's length is not known yet,
// as other traffic makes round trips long at first.
bool leave_bbr(int fd) {
  std::array<char, 16> name = {};
  socklen_t bytes = name.size();
  if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), &bytes) != 0 || std::string(name.data()).compare(0, 3, "bbr") != 0) {
    return true;
  }
  tcp_info info = {};
  bytes = sizeof(info);
  if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0 || info.tcpi_min_rtt > kNear) {
    return false;
  }
  setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
  return true;
}

// Of <linux/tcp.h>, from Linux 6.15 on.
constexpr int kLongestRetransmission = 44; // TCP_RTO_MAX_MS

// Data that a link loses is sent again after 0.2 s, and then after twice as long each time: a link that returns after a
// cut of 2 s would stand still for up to another 1.4 s. So these times end at 1 s, the least that the system allows. It
// gives up after about 14 of them, which must be later than the silence that ends a host: not for a long one, nor where
// fewer attempts are set than usual.
void return_soon(int fd, int host_timeout) {
  constexpr int kUsualAttempts = 15;
  constexpr int kLongSilence = 120;
  static const int attempts = [] { // read once, not for each connection
    int set = kUsualAttempts;
    std::ifstream("/proc/sys/net/ipv4/tcp_retries2") >> set;
    return set;
  }();
  if (attempts < kUsualAttempts || host_timeout > kLongSilence) {
    return;
  }
  const int milliseconds = std::max(1000, 1000 * host_timeout / 11);
  setsockopt(fd, IPPROTO_TCP, kLongestRetransmission, &milliseconds, sizeof(milliseconds));
}

void prepare(int fd, int host_timeout) {
  keep_alive(fd, host_timeout);
  // A receiver that is stopped, or busy, does not read for a while; that is no silence. is_silent() sees silent hosts.
  const unsigned never = 0;
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &never, sizeof(never));
  return_soon(fd, host_timeout);
  send_at_once(fd);
}

bool is_for_later(int error) {
  return error == EAGAIN || error == EINTR;
}

} // namespace

Connections::Connections() : epoll_fd_(epoll_create1(EPOLL_CLOEXEC)) {}

Connections::~Connections() {
  owned_ringer_.reset();
  for (auto& socket : storage_) {
    if (socket.fd >= 0) {
      ::close(socket.fd);
    }
  }
  for (const int fd : {listener_.load(), epoll_fd_}) {
    if (fd >= 0) {
      ::close(fd);
    }
  }
}

std::string Connections::listen(const std::vector<std::string>& addresses) {
  if (listener_ < 0) {
    const auto at = addresses.empty() ? std::vector<std::string>{"127.0.0.1"} : addresses;
    listener_ = listen_at(at);
    line_ = with_mark(describe_listener(listener_, at));
    mark_ = mark_of(line_);
    use();
  }
  return line_;
}

void Connections::start(PeerId self, Doorbell& bell, std::function<void()> on_call) {
  on_call_ = std::move(on_call);
  self_ = self;
  host_timeout_ = settings().host_timeout;
  bell_ = &bell;
  if (listener_ >= 0 || !peers_.empty()) {
    use();
  }
}

void Connections::use() {
  if (bell_ != nullptr && !owned_ringer_) {
    owned_ringer_ = std::make_unique<Ringer>(epoll_fd_, *bell_);
    ringer_ = owned_ringer_.get();
  }
}

void Connections::add(PeerId number, const std::string& line) {
  use();
  auto& peer = peers_[number];
  if (peer.places.empty()) {
    peer.mark = mark_of(line);
    // Containers' bridges have the same address on every host, so own addresses come last: those of peers of this host.
    peer.places = read_listener(line, {});
    const auto own = own_addresses();
    std::stable_partition(peer.places.begin(), peer.places.end(), [&](const PeerAddress& place) {
      return std::find(own.begin(), own.end(), place.text) == own.end();
    });
    peer.refused.assign(peer.places.size(), false);
  }
}

void Connections::renew(PeerId number, const std::string& line) {
  close(number);
  for (auto* numbers : {&trying_, &refused_}) {
    numbers->erase(std::remove(numbers->begin(), numbers->end(), number), numbers->end());
  }
  const auto is_of_peer = [&](const Transport::Ended& ended) { return ended.peer == number; };
  ended_.erase(std::remove_if(ended_.begin(), ended_.end(), is_of_peer), ended_.end());
  Peer renewed;
  if (const auto found = peers_.find(number); found != peers_.end()) {
    renewed.past = std::move(found->second.past);
    renewed.past.push_back(found->second.mark);
  }
  peers_[number] = std::move(renewed);
  add(number, line);
}

void Connections::want(PeerId number) {
  auto& peer = peers_.at(number);
  if (peer.trying || peer.open != nullptr || peer.over) {
    return;
  }
  peer.trying = true;
  peer.began = Clock::now();
  peer.again = peer.began;
  trying_.push_back(number);
  if (peer.accepted == nullptr) {
    try_next(number, peer);
  }
}

void Connections::want_additional(PeerId number) {
  auto& peer = peers_.at(number);
  PeerAddress place; // where the first connection goes to; that may have come from there, from another port
  place.length = sizeof(place.address);
  if (peer.open == nullptr || peer.adding != nullptr || peer.places.empty() ||
      getpeername(peer.open->fd, reinterpret_cast<sockaddr*>(&place.address), &place.length) != 0) {
    return;
  }
  // the port has the same offset in both kinds of address
  reinterpret_cast<sockaddr_in&>(place.address).sin_port = reinterpret_cast<sockaddr_in&>(peer.places.front().address).sin_port;
  const int fd = begin_to_connect(place);
  if (fd < 0 || !can_spare(fd)) {
    if (fd >= 0) {
      ::close(fd);
    }
    return;
  }
  keep_alive(fd, host_timeout_);
  peer.adding = take(fd, State::kConnecting, number);
  peer.adding->additional = peer.adding->own = true;
  peer.adding->hello = hello(self_, mark_, number, peer.mark, true);
  watch(*peer.adding, EPOLLOUT);
}

bool Connections::can_spare(int fd) const {
  return static_cast<rlim_t>(fd) + peers_.size() < most_descriptors() / 2; // the system gives the lowest one that is free
}

Connections::Socket* Connections::socket_of(const Peer& peer, size_t number) {
  return number == 0 ? peer.open : number <= peer.additional.size() ? peer.additional[number - 1] : nullptr;
}

int Connections::fd(PeerId peer, size_t number) const {
  const auto found = peers_.find(peer);
  const auto* socket = found == peers_.end() ? nullptr : socket_of(found->second, number);
  return socket == nullptr ? -1 : socket->fd.load();
}

void Connections::watch_writes(PeerId peer, size_t number, bool on) {
  if (auto* socket = socket_of(peers_.at(peer), number)) {
    socket->steady = socket->steady || (on && leave_bbr(socket->fd));
    watch(*socket, EPOLLIN | (on ? EPOLLOUT : 0U));
  }
}

void Connections::stop_watching(PeerId peer) {
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd(peer), nullptr);
}

void Connections::drop_additional(PeerId peer, size_t number) {
  drop(*std::exchange(peers_.at(peer).additional[number - 1], nullptr));
}

void Connections::shut(PeerId peer) {
  shutdown(fd(peer), SHUT_WR);
}

std::optional<Path> Connections::path(PeerId number) const {
  tcp_info info = {};
  socklen_t bytes = sizeof(info);
  if (getsockopt(fd(number), IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0 || info.tcpi_min_rtt < kFar ||
      info.tcpi_min_rtt == UINT32_MAX) {
    return std::nullopt;
  }
  const auto limited = static_cast<double>(info.tcpi_sndbuf_limited + info.tcpi_rwnd_limited);
  return Path{1e-6 * info.tcpi_min_rtt, 1e-6 * info.tcpi_rtt, static_cast<double>(info.tcpi_delivery_rate), 1e-6 * limited};
}

void Connections::limit_unsent(PeerId peer, size_t number, size_t bytes) {
  const int most = static_cast<int>(bytes);
  setsockopt(fd(peer, number), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &most, sizeof(most));
}

void Connections::drop_all_additional(Peer& peer) {
  auto sockets = std::exchange(peer.additional, {});
  sockets.push_back(peer.adding);
  for (auto* socket : sockets) {
    if (socket != nullptr) {
      drop(*socket);
    }
  }
}

void Connections::close(PeerId number) {
  const auto found = peers_.find(number);
  if (found == peers_.end()) {
    return;
  }
  auto& peer = found->second;
  peer.over = true;
  for (auto* socket : {peer.own, peer.accepted, peer.open}) {
    if (socket != nullptr) {
      drop(*socket);
    }
  }
  drop_all_additional(peer);
}

void Connections::end(const Transport::Ended& ended) {
  ended_.push_back(ended);
  close(ended.peer);
}

void Connections::on_end(PeerId number, int error, bool departed, bool expelled) {
  auto& peer = peers_.at(number);
  if (departed || expelled || is_silence(error)) {
    end({number, departed ? fog::Peer::State::kLeft : fog::Peer::State::kSilent, expelled ? kCut : kSilent});
    return;
  }
  if (peer.open != nullptr) {
    drop(*peer.open);
  }
  drop_all_additional(peer);
  peer.broken = true;
  peer.place = peer.rounds = 0;
  peer.refused.assign(peer.places.size(), false);
  peer.began = peer.again = Clock::now(); // the attempts that led to the connection may still count as going on
  want(number);
}

bool Connections::is_closed_by(PeerId number) const {
  const auto found = peers_.find(number);
  if (found == peers_.end()) {
    return false;
  }
  pollfd polled = {fd(number), POLLRDHUP, 0};
  return found->second.broken || found->second.over || (polled.fd >= 0 && ::poll(&polled, 1, 0) == 1);
}

std::vector<Transport::Ended> Connections::take_ended() {
  if (const auto now = Clock::now(); proven_ > 0 && now >= next_look_at_silence_) {
    next_look_at_silence_ = now + kSilenceInterval;
    const auto silent = [this](const Socket* socket) { return socket != nullptr && is_silent(socket->fd, host_timeout_); };
    for (const auto& [number, peer] : peers_) {
      if (peer.open != nullptr && silent(peer.open)) {
        end({number, fog::Peer::State::kSilent, kSilent});
        continue;
      }
      for (const auto* socket : peer.additional) {
        if (silent(socket)) { // it alone may be cut, by a firewall; its end is read next
          shutdown(socket->fd, SHUT_RDWR);
        }
      }
    }
  }
  return std::exchange(ended_, {});
}

void Connections::close_all() {
  for (auto* socket = sockets_.load(); socket != nullptr; socket = socket->next) {
    if (const int fd = socket->fd; fd >= 0) {
      ::close(fd);
    }
  }
  if (listener_ >= 0) {
    ::close(listener_);
  }
  if (auto* ringer = ringer_.load()) {
    ringer->close_all();
  }
  ::close(epoll_fd_);
}

void Connections::poll(User& user) {
  if (!is_used()) {
    return;
  }
  auto& ringer = *owned_ringer_;
  const bool rung = ringer.rung();
  ringer.heard(); // before the look: later news ring again
  const auto now = proven_ == 0 && !is_connecting() && !rung ? Clock::now() : Clock::time_point();
  if (now != Clock::time_point() && now < next_look_) {
    return; // only a new connection could come, which is no hurry
  }
  std::array<epoll_event, 32> events;
  const int count = epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    if (events[i].data.ptr == nullptr) {
      accept_all();
      continue;
    }
    // The descriptor of an event may have been closed since, and its socket reused. So handlers check the state of the
    // socket itself.
    auto& socket = *static_cast<Socket*>(events[i].data.ptr);
    if (socket.state != State::kOpen) {
      on_event(socket, user);
      continue;
    }
    const PeerId peer = socket.peer;
    if ((events[i].events & EPOLLOUT) != 0) {
      user.on_writable(peer, socket.number);
    }
    if ((events[i].events & ~EPOLLOUT) != 0 && socket.state == State::kOpen && socket.peer == peer) {
      user.on_readable(peer, socket.number);
    }
  }
  look_at_time();
}

void Connections::look_at_time() {
  if (!is_connecting() && listens_ == (listener_ >= 0)) {
    if (proven_ == 0) {
      next_look_ = Clock::now() + kLookInterval;
    }
    return;
  }
  const auto now = Clock::now();
  if (now < next_look_) {
    return;
  }
  next_look_ = now + kLookInterval;
  if (!listens_ && listener_ >= 0) { // the first time, or after descriptors had run out
    epoll_event event = {};
    event.events = EPOLLIN;
    listens_ = epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, listener_, &event) == 0;
  }
  for (size_t i = 0; i < trying_.size();) {
    const PeerId number = trying_[i];
    auto& peer = peers_.at(number);
    const bool late =
        peer.broken ? now > peer.began + kDoubt : !peer.answered && now > peer.began + std::chrono::seconds(host_timeout_);
    if (peer.open != nullptr || peer.over || late) {
      if (peer.open == nullptr && !peer.over) {
        end({number, fog::Peer::State::kSilent, peer.broken ? kCut : kNotReached});
      }
      peer.trying = false;
      trying_[i] = trying_.back();
      trying_.pop_back();
      continue;
    }
    // Once it is connected, only the choice of another address justifies leaving it: a process that does not answer may
    // be stopped.
    if (peer.own != nullptr && now > peer.own->limit && (peer.own->state == State::kConnecting || peer.places.size() > 1)) {
      if (peer.own->state == State::kConnecting) {
        on_failed(number, peer, ETIMEDOUT);
      }
      drop(*peer.own);
    }
    if (peer.own == nullptr && peer.accepted == nullptr && now >= peer.again) {
      try_next(number, peer);
    }
    ++i;
  }
  while (!unproven_.empty() && now > unproven_.front()->limit) {
    drop(*unproven_.front());
  }
}

void Connections::accept_all() {
  for (;;) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) { // no descriptors: look again later
        epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, listener_, nullptr);
        listens_ = false;
        next_look_ = Clock::now() + 25 * kLookInterval;
      }
      return;
    }
    if (unproven_.size() >= std::min(kMostUnproven, most_descriptors() / 8)) {
      drop(*unproven_.front());
    }
    keep_alive(fd, host_timeout_);
    auto* accepted = take(fd, State::kAccepted, -1);
    accepted->limit = Clock::now() + kPatience;
    unproven_.push_back(accepted);
    watch(*accepted, EPOLLIN);
  }
}

void Connections::try_next(PeerId number, Peer& peer) {
  if (peer.places.empty()) {
    try_later(peer); // until host_timeout_ is over: the peer may connect to this process
    return;
  }
  const int fd = begin_to_connect(peer.places[peer.place]);
  if (fd < 0) {
    const int error = errno;
    if (error != EMFILE && error != ENFILE) {
      on_failed(number, peer, error);
    } else if (!std::exchange(told_of_limit_, true)) {
      LOG(WARNING) << "fog: world rank " << self_ << ": the limit of open files (ulimit -n: " << most_descriptors()
                   << ") forbids a connection to world rank " << number << ", which is tried again. Further cases are not reported.";
    }
    try_later(peer);
    return;
  }
  keep_alive(fd, host_timeout_);
  peer.own = take(fd, State::kConnecting, number);
  peer.own->hello = hello(self_, mark_, number, peer.mark);
  peer.own->limit = Clock::now() + kFirstPatience * (1 << (2 * std::min(peer.rounds, kLongestRound)));
  watch(*peer.own, EPOLLOUT);
}

void Connections::on_failed(PeerId number, Peer& peer, int error) {
  peer.refused[peer.place] = error == ECONNREFUSED;
  if (peer.answered == peer.place && error != ECONNREFUSED) {
    peer.answered.reset();
  }
  if (std::all_of(peer.refused.begin(), peer.refused.end(), [](bool refused) { return refused; })) {
    end({number, fog::Peer::State::kLost, peer.broken ? kLost : kRefused});
  }
}

void Connections::try_later(Peer& peer) {
  if (!peer.places.empty() && ++peer.place == peer.places.size()) {
    peer.place = 0;
    ++peer.rounds;
  }
  peer.again = Clock::now() + kPause * (1 << std::min(peer.rounds, kLongestPause));
}

Connections::Socket* Connections::take(int fd, State state, PeerId peer) {
  if (free_.empty()) {
    auto& added = storage_.emplace_back();
    added.next = sockets_.load();
    free_.reserve(storage_.size());
    free_.push_back(&added);
    sockets_ = &added;
  }
  auto* socket = free_.back();
  free_.pop_back();
  socket->state = state;
  socket->peer = peer;
  socket->count = 0;
  socket->steady = socket->additional = socket->own = false;
  socket->number = 0;
  socket->fd = fd;
  return socket;
}

void Connections::drop(Socket& socket) {
  const int fd = socket.fd.exchange(-1);
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, fd, nullptr); // explicitly, because a forked child may hold the same connection
  if (socket.additional) {
    shutdown(fd, SHUT_RDWR); // for the same reason: the other side must see the end of all connections
  }
  ::close(fd);
  if (const auto position = std::find(unproven_.begin(), unproven_.end(), &socket); position != unproven_.end()) {
    unproven_.erase(position);
  }
  if (socket.additional) {
    auto& peer = peers_.at(socket.peer);
    peer.adding = peer.adding == &socket ? nullptr : peer.adding;
  } else if (socket.peer >= 0) {
    auto& peer = peers_.at(socket.peer);
    proven_ -= peer.open == &socket || peer.accepted == &socket ? 1 : 0;
    if (peer.own == &socket && !peer.over) {
      try_later(peer);
    }
    for (auto* its : {&peer.own, &peer.accepted, &peer.open}) {
      if (*its == &socket) {
        *its = nullptr;
      }
    }
  }
  socket.state = State::kFree;
  free_.push_back(&socket);
}

void Connections::watch(Socket& socket, uint32_t events) const {
  epoll_event event = {};
  event.events = events;
  event.data.ptr = &socket;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, socket.fd, &event) != 0) {
    epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, socket.fd, &event);
  }
}

// --- how a connection is made: what the two sides say to each other, and which of two attempts is kept ---

void Connections::on_event(Socket& socket, User& user) {
  switch (socket.state) {
    case State::kConnecting:
      on_connected(socket);
      break;
    case State::kGreeting:
      on_nonce(socket);
      break;
    case State::kProving:
      on_verdict(socket, user);
      break;
    case State::kAccepted:
      on_hello(socket);
      break;
    case State::kChallenged:
      on_proof(socket, user);
      break;
    case State::kWelcomed:
      on_ready(socket, user);
      break;
    case State::kOpen:
    case State::kFree:
      break;
  }
}

bool Connections::read_word(Socket& socket, size_t bytes) {
  const auto count = recv(socket.fd, socket.received.data() + socket.count, bytes - socket.count, 0);
  if (count > 0) {
    socket.count += static_cast<size_t>(count);
    if (socket.count == bytes) {
      socket.count = 0;
      return true;
    }
  } else if (count == 0 || !is_for_later(errno)) {
    drop(socket);
  }
  return false;
}

bool Connections::put(Socket& socket, const void* data, size_t bytes) { // so few bytes always fit
  if (::send(socket.fd, data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes)) {
    return true;
  }
  drop(socket);
  return false;
}

void Connections::on_connected(Socket& socket) {
  const int error = error_of_socket(socket.fd);
  const bool connected = error == 0;
  const bool sent = connected && ::send(socket.fd, &socket.hello, sizeof(socket.hello), MSG_NOSIGNAL) == sizeof(socket.hello);
  if (socket.additional) {
    if (sent) {
      socket.state = State::kGreeting;
      watch(socket, EPOLLIN);
    } else {
      drop(socket);
    }
  } else if (sent) {
    auto& peer = peers_.at(socket.peer);
    peer.answered = peer.place;
    peer.refused[peer.place] = false;
    if (!peer.broken) {
      peer.began = Clock::now(); // if the host falls silent before the connection is open, that counts from here
    }
    socket.state = State::kGreeting;
    watch(socket, EPOLLIN);
  } else if (!connected || !is_for_later(errno)) { // otherwise the event was that of an earlier socket
    auto& peer = peers_.at(socket.peer);
    if (!connected) {
      on_failed(socket.peer, peer, error);
    }
    if (peer.own == &socket) { // the peer has not ended by that
      drop(socket);
    }
  }
}

void Connections::on_nonce(Socket& socket) {
  if (!read_word(socket, sizeof(Nonce))) {
    return;
  }
  std::memcpy(socket.nonce.data(), socket.received.data(), sizeof(Nonce));
  const auto proof = prove(Side::kConnects, socket.hello, socket.nonce);
  if (put(socket, proof.data(), proof.size())) {
    socket.state = State::kProving;
  }
}

void Connections::on_verdict(Socket& socket, User& user) {
  if (!read_word(socket, sizeof(Verdict))) {
    return;
  }
  Verdict verdict;
  std::memcpy(&verdict, socket.received.data(), sizeof(verdict));
  const bool proven = is_proof(verdict.proof, Side::kAccepts, socket.hello, socket.nonce);
  if (socket.additional) {
    if (proven && verdict.word == kWelcome) {
      peers_.at(socket.peer).adding = nullptr;
      open_additional(socket, user);
    } else {
      drop(socket);
    }
  } else if (proven && verdict.word == kNever) {
    refused_.push_back(socket.peer);
    end({socket.peer, fog::Peer::State::kSilent, kCut});
  } else if (!proven || verdict.word != kWelcome || peers_.at(socket.peer).broken) {
    drop(socket);
  } else if (put(socket, &kReady, 1)) {
    open(socket, user);
  }
}

void Connections::on_hello(Socket& socket) {
  if (!read_word(socket, sizeof(Hello))) {
    return;
  }
  std::memcpy(&socket.hello, socket.received.data(), sizeof(Hello));
  if (!is_for(socket.hello, self_, mark_)) {
    drop(socket);
    return;
  }
  socket.nonce = random_nonce();
  if (put(socket, socket.nonce.data(), socket.nonce.size())) {
    socket.state = State::kChallenged;
  }
}

void Connections::on_proof(Socket& socket, User& user) {
  if (!read_word(socket, sizeof(Proof))) {
    return;
  }
  Proof proof;
  std::memcpy(proof.data(), socket.received.data(), sizeof(proof));
  if (!is_proof(proof, Side::kConnects, socket.hello, socket.nonce)) {
    if (!std::exchange(told_of_refusal_, true)) {
      LOG(WARNING)
          << "fog: world rank " << self_ << ": a process "
          << (socket.hello.from == kJoins ? "that is no rank yet" : "that says it is world rank " + std::to_string(socket.hello.from))
          << " has connected, but does not know the job's secret (FOG_JOB_SECRET); it was dropped. Further cases are not reported.";
    }
    drop(socket);
    return;
  }
  const PeerId from = socket.hello.from;
  const auto found = peers_.find(from);
  const auto mark = socket.hello.from_mark;
  Verdict verdict = {};
  const auto is_past = [&](const Peer& its) { return std::find(its.past.begin(), its.past.end(), mark) != its.past.end(); };
  const auto is_under_way = [&](const Peer& its) { // an attempt that nothing has answered may have a way that is closed
    return its.own != nullptr && its.own->state != State::kConnecting && self_ < from;
  };
  if (is_additional(socket.hello)) {
    verdict.word = welcomes_additional(socket) ? kWelcome : kLater;
  } else if (from != kJoins && found != peers_.end() && is_past(found->second)) {
    verdict.word = kNever;
  } else if (from == kJoins) {
    verdict.word = kWelcome;
  } else if (
      found == peers_.end() || found->second.mark != mark || found->second.open != nullptr || found->second.broken ||
      is_under_way(found->second)) {
    verdict.word = kLater;
  } else {
    verdict.word = found->second.over ? kNever : kWelcome;
  }
  if (verdict.word != kLater) {
    verdict.proof = prove(Side::kAccepts, socket.hello, socket.nonce);
  }
  if (!put(socket, &verdict, sizeof(verdict))) {
    return;
  }
  if (from == kJoins) {
    on_call_();
  }
  if (verdict.word != kWelcome || from == kJoins) {
    drop(socket);
    return;
  }
  unproven_.erase(std::find(unproven_.begin(), unproven_.end(), &socket));
  socket.peer = from;
  if (is_additional(socket.hello)) {
    socket.additional = true;
    open_additional(socket, user);
    return;
  }
  auto& peer = found->second;
  for (auto* other : {peer.own, peer.accepted}) { // an attempt that gives way, and one that the other side has left
    if (other != nullptr) {
      drop(*other);
    }
  }
  socket.state = State::kWelcomed;
  peer.accepted = &socket;
  ++proven_;
}

void Connections::on_ready(Socket& socket, User& user) {
  if (read_word(socket, 1)) {
    if (socket.received[0] == kReady) {
      open(socket, user);
    } else {
      drop(socket);
    }
  }
}

void Connections::open(Socket& socket, User& user) {
  auto& peer = peers_.at(socket.peer);
  proven_ += peer.own == &socket ? 1 : 0;
  (peer.own == &socket ? peer.own : peer.accepted) = nullptr;
  if (peer.accepted != nullptr) {
    drop(*peer.accepted);
  }
  peer.open = &socket;
  socket.state = State::kOpen;
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, socket.fd, nullptr);
  socket.fd = moved_up(socket.fd, static_cast<int>(peers_.size()));
  prepare(socket.fd, host_timeout_);
  watch(socket, EPOLLIN);
  user.on_open(socket.peer);
}

bool Connections::welcomes_additional(const Socket& socket) const {
  const auto found = peers_.find(socket.hello.from);
  if (found == peers_.end() || found->second.mark != socket.hello.from_mark || found->second.open == nullptr) {
    return false;
  }
  const auto& all = found->second.additional;
  const size_t theirs = std::count_if(all.begin(), all.end(), [](const Socket* each) { return each != nullptr && !each->own; });
  return theirs + 1 < kMostConnections && can_spare(socket.fd);
}

void Connections::open_additional(Socket& socket, User& user) {
  auto& peer = peers_.at(socket.peer);
  peer.additional.push_back(&socket);
  socket.number = peer.additional.size();
  socket.state = State::kOpen;
  prepare(socket.fd, host_timeout_);
  watch(socket, EPOLLIN);
  user.on_open_additional(socket.peer, socket.number, socket.own);
}

Ringer::Ringer(int sockets, Doorbell& bell)
    : sockets_(sockets), bell_(bell), waiting_(epoll_create1(EPOLL_CLOEXEC)), stop_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event event = {};
  event.data.fd = sockets_; // without events it waits for arm()
  const bool waits = epoll_ctl(waiting_, EPOLL_CTL_ADD, sockets_, &event) == 0;
  event.events = EPOLLIN;
  event.data.fd = stop_;
  if (!waits || epoll_ctl(waiting_, EPOLL_CTL_ADD, stop_, &event) != 0) {
    return;
  }
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error&) { // the engine polls instead
  }
}

Ringer::~Ringer() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = write(stop_, &one, sizeof(one));
    thread_.join();
  }
  close_all();
}

void Ringer::close_all() {
  for (const int fd : {waiting_, stop_}) {
    if (fd >= 0) {
      close(fd);
    }
  }
}

void Ringer::arm() {
  if (works()) {
    epoll_event event = {};
    event.events = EPOLLIN | EPOLLONESHOT;
    event.data.fd = sockets_;
    epoll_ctl(waiting_, EPOLL_CTL_MOD, sockets_, &event);
  }
}

void Ringer::run() {
  c10::setThreadName("fog_tcp");
  for (;;) {
    epoll_event event = {};
    const int count = epoll_wait(waiting_, &event, 1, -1);
    if (count < 0 && errno != EINTR) {
      return;
    }
    if (count > 0 && event.data.fd == stop_) {
      return;
    }
    if (count > 0) {
      rung_.store(true, std::memory_order_release);
      if (bell_.listening.load() == 0) { // nothing is in flight here: the background thread does not listen, but may sleep
        bell_.wake(Doorbell::kBackground);
      }
      bell_.ring();
    }
  }
}

} // namespace fog::tcp
