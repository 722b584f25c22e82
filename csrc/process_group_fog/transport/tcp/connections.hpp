// TCP connections to other processes of the job: one for each pair, made on first use, from either side, and additional
// ones where a side asks for them.
//
// If two processes connect to each other at once, the connection of the lower number is kept: the higher one accepts it
// and leaves its own attempt, and the lower one answers "later". A connection carries messages only once both sides know
// that it is the one, so no message is on a connection that is left.
//
// An additional connection is optional: an attempt that fails, or that the other side refuses, leaves no trace. Each side
// makes its own, for the data that it sends, so neither waits for the other: the side that accepts has the connection from
// its welcome on, for as long as the other one lets it be, and may get nothing by it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "job/peer_sockets.hpp"
#include "transport/doorbell.hpp"
#include "transport/tcp/handshake.hpp"
#include "transport/transport.hpp"

namespace fog::tcp {

// Rings the doorbell when sockets have news, so that the engine's threads can sleep.
//
// The engine sleeps on a futex, which peers of its host wake; a socket cannot. So a thread waits for the sockets, but only
// once for each time that the engine has gone to sleep: it costs nothing while the engine looks by itself.
class Ringer {
 public:
  // `sockets` is an epoll descriptor: the sockets whose news ring `bell`.
  Ringer(int sockets, Doorbell& bell);
  ~Ringer();
  Ringer(const Ringer&) = delete;
  Ringer& operator=(const Ringer&) = delete;

  // Returns false if the system has refused the thread, so that nothing rings the bell.
  bool works() const {
    return thread_.joinable();
  }
  // Any thread, after Doorbell::listen() and before the sleep: the next news rings the bell, once.
  void arm();
  // Any thread: returns whether the bell was rung, and heard() has not been called since.
  bool rung() const {
    return rung_.load(std::memory_order_acquire);
  }
  void heard() {
    if (rung()) {
      rung_.store(false, std::memory_order_release);
    }
  }
  // For a forked child, which has no such thread.
  void close_all();

 private:
  void run();

  const int sockets_;
  Doorbell& bell_;
  const int waiting_; // an epoll descriptor with sockets_ and stop_
  const int stop_; // an eventfd
  std::atomic<bool> rung_{false};
  std::thread thread_;
};

// What the system knows about the path of a connection, in seconds and bytes.
struct Path {
  double least_round_trip;
  double round_trip;
  double rate; // at which data has arrived last
  double limited; // for how long, until now, all that the connection may hold was in flight

  // The product of bandwidth and delay: what the connection has in flight when it sends at that rate.
  size_t in_flight() const {
    return static_cast<size_t>(least_round_trip * rate);
  }
};

// By at most so many connections data goes to a peer.
inline constexpr size_t kMostConnections = 4;

// All methods except those for any thread need the engine's lock. No method waits.
class Connections {
 public:
  // What sends and receives on the connections. Called by poll(). A peer's connections have numbers: the first one is 0.
  class User {
   public:
    virtual ~User() = default;
    virtual void on_open(PeerId peer) = 0;
    // `own`: this side has asked for it.
    virtual void on_open_additional(PeerId peer, size_t number, bool own) = 0;
    virtual void on_readable(PeerId peer, size_t number) = 0;
    virtual void on_writable(PeerId peer, size_t number) = 0;
  };

  Connections();
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  // Starts to listen, at the only address, at all addresses of the machine if several are given, or at loopback if none
  // is. Returns a line that tells others where; the same in later calls, and empty if the system forbids it.
  std::string listen(const std::vector<std::string>& addresses);
  // Returns that line; empty before listen().
  const std::string& line() const {
    return line_;
  }
  // This process is `self` from now on, news of sockets rings `bell`, and a process that is no member but knows the
  // secret may ask for attention (call_to_join()).
  void start(PeerId self, Doorbell& bell, std::function<void()> on_call);
  // `peer` listens at `line`. The first line stays.
  void add(PeerId peer, const std::string& line);
  // Another process, which listens at `line`, has that number from now on. The one before finds nobody here any more.
  void renew(PeerId peer, const std::string& line);
  bool knows(PeerId peer) const {
    return peers_.count(peer) > 0;
  }

  // Begins to connect, unless there is a connection or an attempt. on_open() follows, or take_ended() names the peer.
  void want(PeerId peer);
  // Begins to make an additional connection to a peer with a first one, unless there is such an attempt.
  // on_open_additional() follows if it succeeds.
  void want_additional(PeerId peer);
  // Returns the socket of an open connection; -1 if there is none.
  int fd(PeerId peer, size_t number = 0) const;
  // on_writable() is called from now on, or no longer.
  void watch_writes(PeerId peer, size_t number, bool on);
  // Nothing more comes by the first connection, which the other side has closed.
  void stop_watching(PeerId peer);
  // An additional connection has ended. Its number is not used again.
  void drop_additional(PeerId peer, size_t number);
  // Nothing more goes by the first connection, so the other side closes it.
  void shut(PeerId peer);
  // The system's buffer of an open connection takes at most so many bytes that are not on their way.
  void limit_unsent(PeerId peer, size_t number, size_t bytes);
  // Returns what the system knows about the path of the first connection, if that is long.
  std::optional<Path> path(PeerId peer) const;
  // Closes the connection, and neither makes nor accepts another one.
  void close(PeerId peer);
  // The connection has ended, with that error or because the other side has closed it, and everything was read. If the
  // peer has neither said goodbye nor that it counts this process as lost, finds out whether its process has ended:
  // nobody listens there then. take_ended() follows.
  void on_end(PeerId peer, int error, bool departed, bool expelled);
  // Returns whether the other side has closed the connection, even if not everything was read. Costs a system call.
  bool is_closed_by(PeerId peer) const;
  // Returns the peers that have ended, whose host is silent, or that cannot be reached; each once.
  std::vector<Transport::Ended> take_ended();
  // Returns the peers that have refused a connection because they count this process as lost.
  std::vector<PeerId> take_refused() {
    return std::exchange(refused_, {});
  }

  void poll(User& user);
  // Returns whether connections are being made.
  bool is_connecting() const {
    return !trying_.empty() || !unproven_.empty();
  }

  // Returns whether the bell alone does not tell of all news: nothing rings it, it is soon time for another attempt to
  // connect, or take_ended() has something to tell.
  bool must_poll() const {
    return is_used() && (!ringer_.load()->works() || waits_to_try() || !ended_.empty());
  }

  // --- any thread ---
  // Returns whether news has rung the bell.
  bool news() const {
    const auto* ringer = ringer_.load(std::memory_order_acquire);
    return ringer != nullptr && ringer->rung();
  }
  // Call after Doorbell::listen() and before the sleep that news should end.
  void before_sleep() {
    if (auto* ringer = ringer_.load(std::memory_order_acquire)) {
      ringer->arm();
    }
  }
  // For a forked child: closes the inherited sockets.
  void close_all();

 private:
  using Clock = std::chrono::steady_clock;
  enum class State {
    kFree,
    kConnecting,
    kGreeting, // expects a nonce
    kProving, // expects a verdict
    kAccepted, // expects a hello
    kChallenged, // expects a proof
    kWelcomed, // expects that the other side is ready
    kOpen,
  };
  // Sockets never move and are reused, so that a forked child can go through them at any state of its parent's threads.
  struct Socket {
    std::atomic<int> fd{-1};
    Socket* next = nullptr; // next of all sockets
    State state = State::kFree;
    PeerId peer = -1; // -1 if the other side has not proved who it is
    std::array<char, 64> received; // bytes of the other side's next word
    size_t count = 0;
    Hello hello; // of the side that connects
    Nonce nonce; // of the side that accepts
    Clock::time_point limit;
    bool steady = false; // its congestion control is the one to keep
    bool additional = false;
    bool own = false; // this side has connected
    size_t number = 0; // of an open one
  };
  struct Peer {
    std::vector<PeerAddress> places; // to try in turn
    uint64_t mark = 0;
    std::vector<uint64_t> past; // marks of the processes that have had its number
    size_t place = 0;
    size_t rounds = 0;
    std::vector<bool> refused; // by place: nobody listens there, as the last attempt showed
    Socket* own = nullptr; // an attempt from here
    Socket* accepted = nullptr; // one from there that is welcome
    Socket* open = nullptr;
    std::vector<Socket*> additional; // that were opened, by number; null if it has ended
    Socket* adding = nullptr; // an attempt from here to make an additional one
    Clock::time_point began; // of the attempts
    Clock::time_point again; // time of the next attempt
    bool trying = false; // is in trying_
    std::optional<size_t> answered; // the place where something has, and did so in the last attempt there
    bool broken = false; // its connection has ended; whether its process has is to be found out
    bool over = false;
  };

  void on_event(Socket& socket, User& user);
  void accept_all();
  void on_connected(Socket& socket);
  void on_nonce(Socket& socket);
  void on_verdict(Socket& socket, User& user);
  void on_hello(Socket& socket);
  void on_proof(Socket& socket, User& user);
  void on_ready(Socket& socket, User& user);
  // Reads the other side's next word. Returns whether it is complete; drops the socket if it never will be.
  bool read_word(Socket& socket, size_t bytes);
  bool put(Socket& socket, const void* data, size_t bytes);
  void open(Socket& socket, User& user);
  void open_additional(Socket& socket, User& user);
  // Returns whether the other side, which has that mark, may make another connection.
  bool welcomes_additional(const Socket& socket) const;
  // Returns whether the system has descriptors enough, also for a first connection to each peer, without that one.
  bool can_spare(int fd) const;
  void drop_all_additional(Peer& peer);
  static Socket* socket_of(const Peer& peer, size_t number);
  void try_next(PeerId number, Peer& peer);
  void try_later(Peer& peer);
  void look_at_time();
  // An attempt at the present address has failed. If nobody listens at any of them, the process has ended.
  void on_failed(PeerId number, Peer& peer, int error);
  // take_ended() names that peer.
  void end(const Transport::Ended& ended);
  // Returns whether anybody can be reached, or can reach this process. Without that, nothing costs anything.
  bool is_used() const {
    return ringer_.load(std::memory_order_relaxed) != nullptr;
  }
  void use();
  // Returns whether it is only a matter of time until it tries to connect.
  bool waits_to_try() const {
    return std::any_of(trying_.begin(), trying_.end(), [this](PeerId number) {
      const auto& peer = peers_.at(number);
      return peer.own == nullptr && peer.accepted == nullptr;
    });
  }

  Socket* take(int fd, State state, PeerId peer);
  void drop(Socket& socket);
  void watch(Socket& socket, uint32_t events) const;

  const int epoll_fd_;
  std::atomic<int> listener_{-1};
  std::string line_;
  uint64_t mark_ = 0;
  std::function<void()> on_call_;
  bool listens_ = false; // the listener is watched
  PeerId self_ = -1;
  int host_timeout_ = 0;
  Doorbell* bell_ = nullptr;
  std::unique_ptr<Ringer> owned_ringer_;
  std::atomic<Ringer*> ringer_{nullptr}; // null until it is needed
  std::unordered_map<PeerId, Peer> peers_;
  std::vector<PeerId> trying_; // peers to which a connection is wanted
  std::deque<Socket> storage_;
  std::atomic<Socket*> sockets_{nullptr}; // all sockets
  std::vector<Socket*> free_;
  std::vector<Socket*> unproven_; // accepted, from sides that have not proved who they are, by age
  std::vector<Transport::Ended> ended_;
  std::vector<PeerId> refused_;
  bool told_of_refusal_ = false;
  bool told_of_limit_ = false;
  Clock::time_point next_look_;
  Clock::time_point next_look_at_silence_;
  size_t proven_ = 0; // sockets that are open or welcome, without additional ones
};

} // namespace fog::tcp
