// Where processes listen for others of their job that are on other hosts, and how these get there.
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

// A socket that listens at the address, or at all of the machine if there are several; -1 if there is none.
int listen_at(const std::vector<std::string>& addresses);

// What others are told of a socket that listens at these: a line; empty if nobody can come.
std::string describe_listener(int fd, const std::vector<std::string>& addresses);

// The addresses in that line but those of `own`: containers' bridges have the same one everywhere.
std::vector<PeerAddress> read_listener(const std::string& line, const std::vector<std::string>& own);

// A socket that is about to be connected, and can be written to once that is settled; -1 and errno if that is so at once.
int begin_to_connect(const PeerAddress& to);

// What has become of it: 0 or an error number.
int error_of_socket(int fd);

rlim_t most_descriptors();

// The same under a high number: at its end a process's descriptors are closed from the highest down (seen with Linux 6), so the news that it
// has ended is out before MPI's connections break. There may be `size` of them.
int moved_up(int fd, int size);

// The connection breaks after so many seconds without a sign of life.
void keep_alive(int fd, int seconds);

// Tries whether anybody answers where a process listens. What a host's firewall keeps out is not to be taken for the end of its processes.
class ReachProbe {
 public:
  // Begins.
  explicit ReachProbe(const std::string& line);
  ~ReachProbe();
  ReachProbe(const ReachProbe&) = delete;
  ReachProbe& operator=(const ReachProbe&) = delete;

  // The first address that has answered by then, in digits; empty if none has.
  std::string reached(std::chrono::steady_clock::time_point limit) const;

 private:
  struct Try {
    int fd;
    std::string text;
  };
  std::vector<Try> tries_;
};

} // namespace fog
