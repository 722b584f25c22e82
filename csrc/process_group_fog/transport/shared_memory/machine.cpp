#include "transport/shared_memory/machine.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

namespace fog::shared_memory {
namespace {

// Of user processes on x86-64, which is also the least of 64-bit ARM and POWER servers. Where there are fewer, mapping fails
// and the arena makes do with less.
constexpr size_t kHardwareAddresses = size_t(1) << 47;
// Freed blocks are joined and given out again, so offsets run short only by fragmentation: twice the memory is ample. A
// container's own limit, or other ranks' use, does not matter: an arena takes addresses, and memory only where it is used.
constexpr size_t kTimesMemory = 2;

Machine& values() {
  static Machine machine = [] {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return Machine{page, static_cast<size_t>(std::max(0L, sysconf(_SC_PHYS_PAGES))) * page};
  }();
  return machine;
}

} // namespace

const Machine& machine() {
  return values();
}

void emulate_machine(const Machine& other) {
  auto& machine = values();
  machine.page = other.page > 0 ? other.page : machine.page;
  machine.memory = other.memory > 0 ? other.memory : machine.memory;
}

size_t address_space() {
  rlimit limit = {};
  return getrlimit(RLIMIT_AS, &limit) == 0 ? std::min<rlim_t>(limit.rlim_cur, kHardwareAddresses) : kHardwareAddresses;
}

size_t arena_bytes(size_t memory, int local_ranks, size_t addresses) {
  // All arenas together leave half of the addresses to the program: libraries, files, devices.
  const size_t share = addresses / 2 / static_cast<size_t>(std::max(1, local_ranks));
  const size_t page = machine().page;
  return std::min(memory * kTimesMemory, share) / page * page;
}

} // namespace fog::shared_memory
