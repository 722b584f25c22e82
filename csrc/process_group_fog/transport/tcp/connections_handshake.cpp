// How a connection is made: what the two sides say to each other, and which of two attempts is kept.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <c10/util/Logging.h>

#include "transport/tcp/connections.hpp"

namespace fog::tcp {
namespace {

void prepare(int fd, int host_timeout) {
  keep_alive(fd, host_timeout);
  // A receiver that is stopped, or busy, does not read for a while; that is no silence. is_silent() sees silent hosts.
  const unsigned never = 0;
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &never, sizeof(never));
  send_at_once(fd);
}

bool is_for_later(int error) {
  return error == EAGAIN || error == EINTR;
}

} // namespace

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
      on_proof(socket);
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
  if (sent) {
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
  if (proven && verdict.word == kNever) {
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

void Connections::on_proof(Socket& socket) {
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
  if (from != kJoins && found != peers_.end() && is_past(found->second)) {
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
  auto& peer = found->second;
  for (auto* other : {peer.own, peer.accepted}) { // an attempt that gives way, and one that the other side has left
    if (other != nullptr) {
      drop(*other);
    }
  }
  unproven_.erase(std::find(unproven_.begin(), unproven_.end(), &socket));
  socket.peer = from;
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

} // namespace fog::tcp
