// Anonymous files (memfd): memory without a name in any file system. Other processes of the host open it through /proc.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace fog::shared_memory {

// Creates an empty file that cannot be executed; -1 if the system has no memfd. Call fix_size() next.
int create_memfd(const char* name);

// Fixes the size of the file. New bytes are zero, and the size cannot be changed any more. Returns false if the file
// has another fixed size. Every process that has the file open may call this, with the same size.
bool fix_size(int fd, size_t bytes);

// Creates a file of `bytes` zeros whose size cannot be changed and which cannot be executed; -1 if the system has no
// memfd.
int create_memfd(const char* name, size_t bytes);

// Maps the first `bytes` of a file; nullptr if that fails. `flags` are more than MAP_SHARED. With ThreadSanitizer, which
// knows memory by its address, ranks of one process share one writable mapping of a file.
void* map_memfd(int fd, size_t bytes, int protection, int flags = 0);
void unmap_memfd(void* memory, size_t bytes);

// Opens file `number` of process `pid` for reading and writing; -1 if there is none. fix_size() tells whether it comes
// from create_memfd().
int open_memfd_of(pid_t pid, int number);

// Does the same, but returns -1 unless create_memfd() made the file and its size is fixed. Its memory then stays valid
// as long as it is mapped. Sets `bytes` to the size.
int open_memfd(pid_t pid, int number, size_t* bytes);

} // namespace fog::shared_memory
