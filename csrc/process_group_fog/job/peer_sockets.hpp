// Sockets on which processes of a job listen for those on other hosts, and the connections to them.
#pragma once

#include <sys/resource.h>
#include <sys/socket.h>

#include <chrono>
#include <string>
#include <vector>

namespace fog {

struct PeerAddress {
  sockaddr_storage address = {};
  socklen_t length = 0;
  std::string text; // in digits, without the port
};

// Returns a socket that listens at the address, or at all addresses of the machine if there are several; -1 on failure.
int listen_at(const std::vector<std::string>& addresses);

// Returns a line that describes a listening socket to others; empty if they cannot reach it.
std::string describe_listener(int fd, const std::vector<std::string>& addresses);

// Returns the addresses in that line, except those in `own`: containers' bridges have the same address on every host.
std::vector<PeerAddress> read_listener(const std::string& line, const std::vector<std::string>& own);

// Begins to connect a socket and returns it. It becomes writable when the result is known. Returns -1 and sets errno if
// the attempt fails at once.
int begin_to_connect(const PeerAddress& to);

// A socket that closes itself; the descriptor may be -1.
class OwnedSocket {
 public:
  explicit OwnedSocket(int fd) : fd_(fd) {}
  ~OwnedSocket();
  OwnedSocket(const OwnedSocket&) = delete;
  OwnedSocket& operator=(const OwnedSocket&) = delete;

  int fd() const {
    return fd_;
  }
  // Waits for such events of poll(). Returns false at the limit.
  bool await(short events, std::chrono::steady_clock::time_point limit) const;

 private:
  const int fd_;
};

// Returns the result of the attempt: 0 or an error number.
int error_of_socket(int fd);

rlim_t most_descriptors();

// Moves the descriptor to a high number; there may be `size` of them. When a process ends, its descriptors are closed
// from the highest down (observed with Linux 6), so other processes learn of its end before MPI's connections break.
int moved_up(int fd, int size);

// Makes the system break an idle connection after this many seconds without a sign of life; see is_silent() for others.
void keep_alive(int fd, int seconds);

// Lets small messages be sent at once, and not only when the ones before are acknowledged.
void send_at_once(int fd);

// Returns whether nothing has come from the other side's host for so long, although something should have.
bool is_silent(int fd, int seconds);

} // namespace fog
