// The properties of the machine that shared memory depends on: the size of pages, of memory, and of the address space.
#pragma once

#include <cstddef>

namespace fog::shared_memory {

struct Machine {
  size_t page = 0; // the unit of allocation: 4 KiB, or 64 KiB on some ARM64 and POWER systems
  size_t memory = 0; // bytes
};

// Returns the values of this machine.
const Machine& machine();

// For tests: replaces the values that are not 0. Must be called before anything in shared memory is created. The page
// size must be a multiple of the system's.
void emulate_machine(const Machine& other);

// Returns the size of this process's address space: the hardware's limit, or RLIMIT_AS.
size_t address_space();

// Returns the address space for the arena of each of `local_ranks` processes, if each process maps the arenas of all.
size_t arena_bytes(size_t memory, int local_ranks, size_t addresses);

} // namespace fog::shared_memory
