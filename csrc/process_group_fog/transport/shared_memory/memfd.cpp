#include "transport/shared_memory/memfd.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

namespace fog::shared_memory {
namespace {

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U // since Linux 6.3
#endif

// If a file shrank, every process that reads the lost part would end with SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

} // namespace

int create_memfd(const char* name) {
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int fd = memfd_create(name, kFlags | MFD_NOEXEC_SEAL);
  if (fd < 0) { // an older system lacks this flag; the file mode is the next best means
    fd = memfd_create(name, kFlags);
    if (fd >= 0) {
      fchmod(fd, S_IRUSR | S_IWUSR);
    }
  }
  return fd;
}

bool fix_size(int fd, size_t bytes) {
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) { // it has a different fixed size
    return false;
  }
  fcntl(fd, F_ADD_SEALS, kSeals);
  const int seals = fcntl(fd, F_GET_SEALS); // another process may have sealed it first
  return seals >= 0 && (seals & kSeals) == kSeals;
}

int create_memfd(const char* name, size_t bytes) {
  const int fd = create_memfd(name);
  if (fd >= 0 && !fix_size(fd, bytes)) {
    close(fd);
    return -1;
  }
  return fd;
}

int open_memfd_of(pid_t pid, int number) {
  const auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(number);
  return open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
}

int open_memfd(pid_t pid, int number, size_t* bytes) {
  const int fd = open_memfd_of(pid, number);
  if (fd < 0) {
    return -1;
  }
  struct stat status = {};
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(fd, &status) != 0) {
    close(fd);
    return -1;
  }
  *bytes = static_cast<size_t>(status.st_size);
  return fd;
}

} // namespace fog::shared_memory
