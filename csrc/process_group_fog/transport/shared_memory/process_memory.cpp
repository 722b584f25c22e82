#include "transport/shared_memory/process_memory.hpp"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

namespace fog::shared_memory {

int read_process_memory(int pid, const void* from, void* to, size_t bytes) {
  constexpr size_t kMost = size_t(1) << 30; // the kernel stops short of 2 GiB
  const auto* source = static_cast<const char*>(from);
  auto* target = static_cast<char*>(to);
  while (bytes > 0) {
    const size_t part = std::min(bytes, kMost);
    const iovec local = {target, part};
    const iovec remote = {const_cast<char*>(source), part};
    const auto copied = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (copied < 0) {
      if (errno == EINTR) {
        continue;
      }
      return errno;
    }
    if (copied == 0) {
      return EFAULT;
    }
    source += copied;
    target += copied;
    bytes -= static_cast<size_t>(copied);
  }
  return 0;
}

void permit_siblings_to_read() {
  int scope = 0;
  if (std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope && scope == 1) { // with more no process can permit it
    prctl(PR_SET_PTRACER, static_cast<unsigned long>(getppid()), 0, 0, 0);
  }
}

} // namespace fog::shared_memory
