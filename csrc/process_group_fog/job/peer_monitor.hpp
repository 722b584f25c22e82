// Connections between processes of different hosts that carry next to nothing: their systems close them when a process ends.
//
// MPI does not tell that a process of another host has ended: MPICH 5.0.2 crashes in the next send to it (UCX) or does not
// return from it (OFI). So this is looked at before each such send.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "job/peer_sockets.hpp"

namespace fog {

// A TCP connection with each process of another host that this one sends to or waits for, made when it first does. They are a help, not
// a need: where one cannot be made, the end of that process goes unnoticed. No method waits; all but close_all() need one lock.
class PeerMonitor {
 public:
  struct Ended {
    int peer;
    bool silent; // its host does not answer any more, rather than its system having said so
    bool departed; // it has said that it would end
  };

  PeerMonitor();
  ~PeerMonitor();
  PeerMonitor(const PeerMonitor&) = delete;
  PeerMonitor& operator=(const PeerMonitor&) = delete;

  // After how many seconds without a sign of life a host counts as lost: FOG_HOST_TIMEOUT. Throws ValueError if that is no such number.
  static int host_timeout();

  // Where others reach this process, without line breaks, of these addresses: empty if nobody can. From now on it listens there, and
  // nowhere else if it is one address.
  std::string listen(const std::vector<std::string>& addresses);

  // Who may be met: this is rank `rank` of `size`, the others are by rank where they listen.
  //
  // `token`: what they have in common, and no stranger who happens to connect. `reached`: addresses at which processes of the job have
  // been reached, so that a port that is refused there is that of a process that has ended. Elsewhere a firewall may refuse it.
  void meet(int rank, int size, uint64_t token, std::map<int, std::string> others, const std::vector<std::string>& reached);

  // The end of `peer` is to be noticed from now on, as soon as there is a connection.
  void begin(int peer);
  // The same for who is about to send there. False while it is not known whether that process is still there, which takes a round trip
  // where it is, and a moment where nobody answers.
  bool may_send(int peer);

  // Goes on with connections in the making; returns those processes whose end has been seen since the last call.
  std::vector<Ended> poll();

  // Whether that process has ended, as far as can be known now: a system call, 0.3 us.
  bool has_ended(int peer);

  // Of how many processes the end has been seen so far: a system call as well.
  size_t ends() {
    look();
    return ends_;
  }

  // Tells all whom it has a connection with that this process ends in good order.
  void say_goodbye();

  // For a forked child: what it inherited must not outlive the parent.
  void close_all();

 private:
  using Clock = std::chrono::steady_clock;
  enum class State { kFree, kConnecting, kGreeting, kVisitor, kMade, kLeaving };
  // They stay where they are and are used again, so that a forked child can go through them whatever its parent's threads did.
  struct Connection {
    std::atomic<int> fd{-1};
    Connection* next = nullptr; // of all
    State state = State::kFree;
    int peer = -1; // of a visitor not known yet
    bool departed = false;
    std::string received; // from a visitor
    Clock::time_point limit; // of a try, or for a visitor to say who it is
  };
  struct Place {
    PeerAddress address;
    size_t tries = 0;
    size_t cut = 0; // tries that were answered by somebody who then closed the connection
  };
  struct Peer {
    std::vector<Place> places; // to try, the first one now
    Connection* own = nullptr; // begun here
    Connection* theirs = nullptr; // begun there, and made
    Clock::time_point began;
    Clock::time_point again; // when to try next, if `own` is null
    bool trying = false; // is in trying_
    bool given_up = false;
    bool ended = false;
  };

  bool is_known(const Place& place) const {
    return reached_.count(place.address.text) > 0;
  }
  // Whether no more can be known of it soon.
  bool is_settled(const Peer& peer) const;
  bool has_too_many() const;
  void look();
  void accept_all();
  void on_visitor(Connection& visitor);
  // What has come from somebody who is known; false if the connection is gone.
  bool on_bytes(Connection& connection, const char* bytes, size_t count);
  void on_connected(Connection& connection);
  void on_greeting(Connection& connection);
  void on_made(Connection& connection);
  void on_leaving(Connection& connection);
  void try_next(int number, Peer& peer);
  // The first place was tried in vain. True if the next one is to be tried.
  bool on_refused(int number, Peer& peer, int error);
  void on_try_over(int number, Peer& peer);
  void adopt(Connection& connection);
  void end(int number, Peer& peer, bool silent, bool departed);
  void give_up(int number, Peer& peer, const char* why);

  Connection& take(int fd, State state, int peer);
  // This is no end: the other side hears of it, and closes the connection first, so that no reset overtakes the word.
  void leave(Connection& connection);
  void drop(Connection& connection);
  void watch(Connection& connection, uint32_t events) const;

  const int epoll_fd_;
  std::atomic<int> listener_{-1};
  int rank_ = -1;
  int size_ = 0;
  int host_timeout_ = 0;
  uint64_t token_ = 0;
  std::map<int, std::string> others_; // where they listen
  std::vector<std::string> own_; // addresses
  std::set<std::string> reached_;
  std::unordered_map<int, Peer> peers_;
  std::vector<int> trying_; // of these, whose connection is in the making
  std::deque<Connection> storage_;
  std::atomic<Connection*> connections_{nullptr}; // all
  std::vector<Connection*> free_;
  std::vector<Connection*> visitors_;
  bool departed_ = false;
  bool told_of_limit_ = false;
  std::vector<Ended> ended_;
  size_t ends_ = 0;
};

} // namespace fog
