// Events on the connections, and the bytes that are exchanged on them.
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <c10/util/Logging.h>

#include "job/peer_monitor.hpp"
#include "job/secret.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

// A visitor must say within this time who it is.
constexpr auto kVisit = std::chrono::seconds(10);
// An eighth of this number, or of the limit of descriptors, is the most of them at a time; then the oldest has to go.
constexpr rlim_t kMostVisited = 2048;
// The number of times that a connection at a peer's address may be accepted and then closed.
constexpr size_t kMostCut = 3;

// The greeting. The side that connects sends who it is, whom it means, and the proof that it knows the job's secret.
// The other side answers with kWelcome and its own proof. What the visitor proves is about the line by which the
// listener has told where it listens, which has a nonce, and about a nonce of its own, which counts once; so nobody can
// use a proof again. It takes no more messages than a greeting without proofs, because a process answers only while it
// makes progress. The proofs are about the visitor's own line too, so a process whose number another one has taken is a
// stranger. If two processes connect to each other at once, the lower rank leaves its own connection as soon as
// the other one is made. A side that leaves a connection announces it, because it would otherwise look like the end of
// its process.
struct Hello {
  int32_t from;
  int32_t to;
  Nonce nonce;
};
using Proof = std::array<uint8_t, 32>;
constexpr char kWelcome = 'y';
constexpr char kLeft = 'd';
// The last byte of a process that ends in good order.
constexpr char kGoodbye = 'g';
// Asks for the signs of life; the answer is kSigns and a Signs. Both sides are of the same build.
constexpr char kAsk = 'a';
constexpr char kSigns = 's';
constexpr auto kAskInterval = std::chrono::milliseconds(250);
// The sender counts the receiver as lost.
constexpr char kLost = 'l';

bool put(int fd, const void* data, size_t bytes) { // so few bytes always fit
  return ::send(fd, data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

template <typename Message>
std::string bytes_of(const Message& message) {
  return {reinterpret_cast<const char*>(&message), sizeof(message)};
}

// Removes a message from the front of `received`, which is long enough.
template <typename Message>
Message take_from(std::string& received) {
  Message message;
  std::memcpy(&message, received.data(), sizeof(message));
  received.erase(0, sizeof(message));
  return message;
}

Proof prove(const char* who, const std::string& greeting, const std::string& visitor, const std::string& listener) {
  return proof_of(std::string("fog peer ") + who + ' ' + greeting + visitor + '\n' + listener);
}
constexpr const char* kVisitor = "visitor";
constexpr const char* kListener = "listener";

bool is_for_later(int error) {
  return error == EAGAIN || error == EINTR;
}

// The error of a made connection on which nothing has arrived for too long.
bool is_silence(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
}

} // namespace

void PeerMonitor::look() {
  // No process can be recognized before meet(). Visitors are connected already, and wait to be accepted.
  if (rank_ < 0 || (listener_ < 0 && !connections_.load())) {
    return;
  }
  std::array<epoll_event, 16> events;
  int count = 0;
  do {
    count = epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), 0);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.ptr == nullptr) {
        accept_all();
        continue;
      }
      // The descriptor of an event may have been closed since, and its connection reused. So handlers check the state
      // of the socket itself.
      auto& connection = *static_cast<Connection*>(events[i].data.ptr);
      switch (connection.state) {
        case State::kConnecting:
          on_connected(connection);
          break;
        case State::kGreeting:
          on_greeting(connection);
          break;
        case State::kVisitor:
          on_visitor(connection);
          break;
        case State::kMade:
          on_made(connection);
          break;
        case State::kLeaving:
          on_leaving(connection);
          break;
        case State::kFree:
          break;
      }
    }
  } while (count == static_cast<int>(events.size()));
}

// If there are too many connections, further visitors stay in the queue. They are connected, and notice the end of this
// process too.
void PeerMonitor::accept_all() {
  while (!has_too_many()) {
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      return;
    }
    if (8 * visitors_.size() >= std::min<rlim_t>(most_descriptors(), kMostVisited)) {
      auto& oldest = *visitors_.front();
      on_visitor(oldest); // many peers may have come at once, and have said who they are
      if (oldest.state == State::kVisitor) {
        drop(oldest);
      }
    }
    auto& visitor = take(fd, State::kVisitor, -1);
    visitor.limit = Clock::now() + kVisit;
    visitors_.push_back(&visitor);
    watch(visitor, EPOLLIN | EPOLLRDHUP);
  }
}

void PeerMonitor::on_visitor(Connection& visitor) {
  std::array<char, sizeof(Hello) + sizeof(Proof) + 8> bytes; // the process may have left or said goodbye already
  const auto count = recv(visitor.fd, bytes.data(), bytes.size() - visitor.received.size(), 0);
  if (count < 0 && is_for_later(errno)) {
    return;
  }
  visitor.received.append(bytes.data(), static_cast<size_t>(std::max<ssize_t>(count, 0)));
  if (visitor.received.size() < sizeof(Hello) + sizeof(Proof)) {
    if (count <= 0) {
      drop(visitor);
    }
    return;
  }
  const auto greeting = visitor.received.substr(0, sizeof(Hello));
  const auto hello = take_from<Hello>(visitor.received);
  const auto proof = take_from<Proof>(visitor.received);
  const bool is_meant = hello.to == rank_ && others_.count(hello.from) > 0;
  const bool is_of_the_job = is_meant && equal_in_constant_time(proof, prove(kVisitor, greeting, others_[hello.from], own_line_));
  if (is_meant && !is_of_the_job && !std::exchange(told_of_stranger_, true)) {
    LOG(WARNING) << "fog: world rank " << rank_
                 << " has refused a connection whose process does not know the job's secret. Further cases are not reported.";
  }
  auto* peer = is_of_the_job ? &peers_[hello.from] : nullptr;
  if (peer == nullptr || peer->ended || !peer->greetings.insert(greeting).second) {
    drop(visitor);
    return;
  }
  visitors_.erase(std::find(visitors_.begin(), visitors_.end(), &visitor));
  if (peer->theirs != nullptr) { // the peer has given up that connection
    drop(*peer->theirs);
  }
  visitor.peer = hello.from;
  peer->theirs = &visitor;
  const auto answer = kWelcome + bytes_of(prove(kListener, greeting, others_[hello.from], own_line_));
  put(visitor.fd, answer.data(), answer.size());
  if (departed_) {
    put(visitor.fd, &kGoodbye, 1);
  }
  if (rank_ < hello.from && peer->own != nullptr) {
    leave(*peer->own);
  }
  const auto more = std::exchange(visitor.received, {});
  adopt(visitor);
  on_bytes(visitor, more.data(), more.size());
}

bool PeerMonitor::on_bytes(Connection& connection, const char* bytes, size_t count) {
  bool asked = false;
  for (size_t i = 0; i < count; ++i) {
    auto& received = connection.received;
    if (!received.empty()) { // within signs
      received.push_back(bytes[i]);
      if (received.size() == 1 + sizeof(Signs)) {
        std::memcpy(&peers_[connection.peer].signs, received.data() + 1, sizeof(Signs));
        received.clear();
      }
      continue;
    }
    switch (bytes[i]) {
      case kSigns:
        received.push_back(bytes[i]);
        break;
      case kAsk:
        asked = true;
        break;
      case kLost:
        expelled_by_.push_back(connection.peer);
        break;
      case kGoodbye:
        connection.departed = true;
        break;
      case kLeft:
        drop(connection);
        return false;
      default:
        break;
    }
  }
  if (asked && pulse_ != nullptr) { // once, even if this process was stopped meanwhile and was asked many times
    const auto signs = read_signs(*pulse_, Clock::now());
    std::array<char, 1 + sizeof(Signs)> answer;
    answer[0] = kSigns;
    std::memcpy(answer.data() + 1, &signs, sizeof(signs));
    put(connection.fd, answer.data(), answer.size());
  }
  return true;
}

PeerMonitor::Connection* PeerMonitor::made(int number) {
  const auto found = peers_.find(number);
  if (found == peers_.end()) {
    return nullptr;
  }
  for (auto* connection : {found->second.theirs, found->second.own}) {
    if (connection != nullptr && connection->state == State::kMade) {
      return connection;
    }
  }
  return nullptr;
}

std::optional<Signs> PeerMonitor::ask(int number) {
  auto* connection = made(number);
  if (connection == nullptr) {
    return std::nullopt;
  }
  auto& peer = peers_[number];
  if (const auto now = Clock::now(); now >= peer.asked + kAskInterval) {
    peer.asked = now;
    put(connection->fd, &kAsk, 1);
  }
  return peer.signs;
}

void PeerMonitor::expel(int number) {
  if (auto* connection = made(number)) {
    put(connection->fd, &kLost, 1);
  }
}

void PeerMonitor::on_connected(Connection& connection) {
  const int number = connection.peer;
  auto& peer = peers_[number];
  const Hello hello{rank_, number, random_nonce()};
  const auto message = bytes_of(hello) + bytes_of(prove(kVisitor, bytes_of(hello), own_line_, others_[number]));
  int error = error_of_socket(connection.fd);
  if (error == 0 && !put(connection.fd, message.data(), message.size())) {
    error = errno;
    if (is_for_later(error)) { // not connected yet
      return;
    }
  }
  if (error == 0) {
    if (departed_) {
      put(connection.fd, &kGoodbye, 1);
    }
    connection.state = State::kGreeting;
    connection.greeting = bytes_of(hello);
    watch(connection, EPOLLIN | EPOLLRDHUP);
    return;
  }
  drop(connection);
  if (on_refused(number, peer, error)) {
    try_next(number, peer);
  }
}

void PeerMonitor::on_greeting(Connection& connection) {
  const int number = connection.peer;
  auto& peer = peers_[number];
  std::array<char, 64> bytes;
  const auto count = recv(connection.fd, bytes.data(), bytes.size(), 0);
  const int error = count < 0 ? errno : 0;
  if (is_for_later(error)) {
    return;
  }
  auto& received = connection.received;
  received.append(bytes.data(), static_cast<size_t>(std::max<ssize_t>(count, 0)));
  if (received.size() >= 1 + sizeof(Proof) && received.front() == kWelcome) {
    received.erase(0, 1);
    if (equal_in_constant_time(take_from<Proof>(received), prove(kListener, connection.greeting, own_line_, others_[number]))) {
      reached_.insert(peer.places.front().address.text);
      peer.places.clear();
      const auto more = std::exchange(received, {});
      adopt(connection);
      on_bytes(connection, more.data(), more.size());
      return;
    }
  } else if (count > 0 && received.size() < 1 + sizeof(Proof)) {
    return;
  }
  drop(connection);
  if (is_silence(error)) {
    end(number, peer, true, false);
    return;
  }
  // The process may have ended, or the port may belong to another program. The next attempt shows it.
  auto& place = peer.places.front();
  if (++place.cut >= kMostCut) {
    if (is_known(place)) {
      end(number, peer, false, false);
      return;
    }
    peer.places.erase(peer.places.begin());
  }
  try_next(number, peer);
}

void PeerMonitor::on_made(Connection& connection) {
  std::array<char, 64> bytes;
  const auto count = recv(connection.fd, bytes.data(), bytes.size(), 0);
  const int error = count < 0 ? errno : 0;
  if (is_for_later(error)) {
    return;
  }
  if (count > 0) {
    on_bytes(connection, bytes.data(), static_cast<size_t>(count));
    return;
  }
  const int number = connection.peer;
  end(number, peers_[number], is_silence(error), connection.departed);
}

void PeerMonitor::adopt(Connection& connection) {
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, connection.fd, nullptr);
  connection.fd = moved_up(connection.fd, size_);
  keep_alive(connection.fd, host_timeout_);
  connection.state = State::kMade;
  watch(connection, EPOLLIN | EPOLLRDHUP);
}

void PeerMonitor::say_goodbye() {
  departed_ = true;
  for (auto& connection : storage_) {
    if (connection.state == State::kMade || connection.state == State::kGreeting) {
      put(connection.fd, &kGoodbye, 1);
    }
  }
}

void PeerMonitor::leave(Connection& connection) {
  if (connection.state == State::kConnecting || !put(connection.fd, &kLeft, 1)) {
    drop(connection);
    return;
  }
  auto& peer = peers_[connection.peer];
  (peer.own == &connection ? peer.own : peer.theirs) = nullptr;
  connection.state = State::kLeaving;
}

void PeerMonitor::on_leaving(Connection& connection) {
  std::array<char, 8> bytes;
  const auto count = recv(connection.fd, bytes.data(), bytes.size(), 0);
  if (count == 0 || (count < 0 && !is_for_later(errno))) {
    drop(connection);
  }
}

} // namespace fog
