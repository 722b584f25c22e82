// What shared memory depends on in the machine: how large its pages are, how much memory and how many addresses there are.
#pragma once

#include <cstddef>

namespace fog::shared_memory {

struct Machine {
  size_t page = 0; // what the system gives out and takes back at once: 4 KiB, or 64 KiB on some ARM64 and POWER
  size_t memory = 0; // bytes
};

// This one.
const Machine& machine();

// For tests: takes these values instead, where they are not 0. Before anything in shared memory is made; pages of more bytes than
// the system's own, of which they are a multiple.
void emulate_machine(const Machine& other);

// Bytes of addresses that this process may have: what the hardware allows, or RLIMIT_AS.
size_t address_space();

// How many bytes of addresses the arena of each of `local_ranks` processes gets, where each maps the arenas of all.
size_t arena_bytes(size_t memory, int local_ranks, size_t addresses);

} // namespace fog::shared_memory
