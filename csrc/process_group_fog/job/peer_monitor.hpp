// Connections between processes of different hosts that carry next to nothing: their systems close them when a process ends.
//
// MPI does not tell that a process of another host has ended: MPICH 5.0.2 crashes in the next send to it (UCX) or does not
// return from it (OFI). So this is looked at before each such send.
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fog {

// One TCP connection with each of some processes of the world. They are a help, not a need: where one cannot be made, the
// end of that process goes unnoticed. No method waits but wait(); all others need one lock.
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

  // Where others reach this process, without line breaks, of these addresses. It listens there from now on, and nowhere else if it is
  // one address, until all who may come have. Empty if nobody can, or all have come.
  std::string listen(const std::vector<std::string>& addresses);

  // Nobody else may come.
  void stop_listening();

  // Begins to connect rank `rank` of `size` with processes that do the same, by rank, where they listen; whom it has a
  // connection with is left out. poll() goes on with it.
  //
  // `token`: what they have in common, and no stranger who happens to connect.
  void connect(int rank, int size, uint64_t token, const std::map<int, std::string>& addresses);

  // Ranks that the connection with is still in the making.
  std::vector<int> missing() const;

  // Returns when poll() has something to do, or at `limit`. Needs no lock.
  void wait(std::chrono::steady_clock::time_point limit) const;

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

  // In a forked child: what it inherited must not outlive the parent.
  void close_in_child();

 private:
  using Clock = std::chrono::steady_clock;
  struct Address {
    sockaddr_storage address;
    socklen_t length;
  };
  enum class State { kNone, kConnecting, kGreeting, kAwaited, kMade, kEnded };
  struct Line {
    State state = State::kNone;
    std::atomic<int> fd{-1}; // atomic for close_in_child() only
    std::vector<Address> addresses; // that have not refused, the next one to try first
    size_t tries = 0;
    bool departed = false;
    Clock::time_point limit; // of this try
  };
  // Somebody who has connected.
  struct Visitor {
    int fd;
    int peer = -1; // not known yet
    std::string received;
  };

  bool in_making(State state) const {
    return state == State::kConnecting || state == State::kGreeting || state == State::kAwaited;
  }
  void look();
  void accept_all();
  void on_visitor(int fd);
  void on_line(int peer);
  void try_next(int peer, bool refused);
  void adopt(int peer, int fd);
  void give_up(int peer);
  void end_making();
  void watch(int fd, uint64_t key, uint32_t events);
  void drop(int fd);

  const int epoll_fd_;
  std::atomic<int> listener_{-1};
  int rank_ = -1;
  int size_ = 0;
  int host_timeout_ = 0;
  uint64_t token_ = 0;
  std::unique_ptr<Line[]> lines_; // by rank
  std::list<Visitor> visitors_;
  size_t making_ = 0; // lines in the making
  Clock::time_point give_up_; // those that have not come by then
  std::vector<Ended> ended_;
  size_t ends_ = 0;
};

} // namespace fog
