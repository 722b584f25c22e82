#include "transport/shared_memory/machine.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

namespace fog::shared_memory {
namespace {

// Addresses of user processes on x86-64; 64-bit ARM and POWER servers have at least as many. With fewer, mapping fails
// and the arena becomes smaller.
constexpr size_t kHardwareAddresses = size_t(1) << 47;
// Freed blocks are joined and reused, so only fragmentation uses up offsets, and twice the memory is enough. A
// container's own limit and other ranks' use do not matter: an arena takes address space, and memory only for used
// pages.
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
  // All arenas together leave half of the addresses to the program, for libraries, files and devices.
  const size_t share = addresses / 2 / static_cast<size_t>(std::max(1, local_ranks));
  const size_t page = machine().page;
  return std::min(memory * kTimesMemory, share) / page * page;
}

} // namespace fog::shared_memory
