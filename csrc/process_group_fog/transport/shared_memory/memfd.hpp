// Anonymous files (memfd): memory without a name in any file system, which other processes of the host open through /proc.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace fog::shared_memory {

// A file, empty so far, that nobody can execute; -1 where the system has none. fix_size() is to follow.
int create_memfd(const char* name);

// It has so many bytes from now on, all zero but what was written, and nobody can change that; false if it has another size. Whoever has it
// open may say so, each of them the same.
bool fix_size(int fd, size_t bytes);

// A file of so many bytes, all zero, whose size nobody can change any more and which nobody can execute; -1 where the system
// has none.
int create_memfd(const char* name, size_t bytes);

// Opens file `number` of process `pid` for reading and writing; -1 if there is none. fix_size() tells whether it is one of create_memfd().
int open_memfd_of(pid_t pid, int number);

// The same; -1 unless that is a file of create_memfd(), whose memory stays
// where it is for as long as it is mapped. `bytes`: its size.
int open_memfd(pid_t pid, int number, size_t* bytes);

} // namespace fog::shared_memory
