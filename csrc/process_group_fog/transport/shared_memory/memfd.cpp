#include "transport/shared_memory/memfd.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

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

#ifdef __SANITIZE_THREAD__
namespace {

struct Mapping {
  void* memory;
  size_t bytes;
  int users = 0;
};
std::mutex mutex;
std::map<std::pair<dev_t, ino_t>, Mapping> mappings; // by file

} // namespace

void* map_memfd(int fd, size_t bytes, int, int flags) {
  struct stat file = {};
  fstat(fd, &file);
  const std::lock_guard<std::mutex> lock(mutex);
  auto& mapping = mappings[{file.st_dev, file.st_ino}];
  if (mapping.users == 0) {
    mapping.bytes = static_cast<size_t>(file.st_size);
    mapping.memory = mmap(nullptr, mapping.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);
  }
  if (mapping.memory == MAP_FAILED || bytes > mapping.bytes) {
    return nullptr;
  }
  ++mapping.users;
  return mapping.memory;
}

void unmap_memfd(void* memory, size_t) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto& [file, mapping] : mappings) {
    if (mapping.users > 0 && mapping.memory == memory && --mapping.users == 0) {
      munmap(memory, mapping.bytes);
      return;
    }
  }
}
#else
void* map_memfd(int fd, size_t bytes, int protection, int flags) {
  void* memory = mmap(nullptr, bytes, protection, MAP_SHARED | flags, fd, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

void unmap_memfd(void* memory, size_t bytes) {
  munmap(memory, bytes);
}
#endif

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
