// Anonymous files (memfd): memory without a name in any file system, which other processes of the host open through /proc.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace fog::shared_memory {

// A file of so many bytes, all zero, whose size nobody can change any more and which nobody can execute; -1 where the system
// has none.
int create_memfd(const char* name, size_t bytes);

// Opens file `number` of process `pid` for reading and writing; -1 unless that is a file of create_memfd(), whose memory stays
// where it is for as long as it is mapped. `bytes`: its size.
int open_memfd(pid_t pid, int number, size_t* bytes);

} // namespace fog::shared_memory
