// Memory of this process that the other processes of its host can map, and read or write where it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace fog::shared_memory {

// One anonymous, sparse file (memfd) of more bytes than the machine has memory; pages take memory once they were used. As
// the inbox, it leaves nothing behind. Blocks that were freed are kept with their pages and given out again to whoever asks
// for that size or somewhat less: fresh pages cost more than most operations.
class Arena {
 public:
  // This process's; nullptr where the system has no memfd or no address space. Lives until the process ends.
  static Arena* instance();

  // Aligned to cache lines; nullptr if nothing is left, and in a process that was forked from the arena's.
  void* allocate(size_t bytes);
  void free(void* memory);
  // Whether peers may be told to read these bytes in the arena.
  bool contains(const void* data, size_t bytes) const;

  // What peers need to map it.
  int fd() const {
    return fd_;
  }
  uint32_t token() const {
    return token_;
  }

 private:
  Arena(int fd, char* memory, size_t bytes, uint32_t token);
  static Arena* create();
  // Gives the pages of a block back to the system; false if it would not have them.
  bool drop_pages(size_t offset, size_t size);
  void keep_no_more_than(size_t bytes);

  const int fd_;
  char* const memory_;
  const size_t bytes_;
  const uint32_t token_;
  bool forked_ = false;
  std::mutex mutex_;
  size_t end_; // of all blocks ever given out
  size_t in_use_ = 0;
  size_t kept_ = 0; // bytes of freed blocks that still have their pages
  std::unordered_map<size_t, size_t> sizes_; // by offset: of blocks in use
  struct Freed { // offsets of blocks
    std::vector<size_t> with_pages;
    std::vector<size_t> bare;
  };
  std::map<size_t, Freed> freed_; // by size; none has neither
};

// The arena of another process of this host.
class ForeignArena {
 public:
  enum class Access { kRead, kWrite };

  // nullptr if it cannot be mapped.
  static std::shared_ptr<ForeignArena> map(int pid, int fd, uint32_t token, Access access = Access::kRead);
  ~ForeignArena();
  ForeignArena(const ForeignArena&) = delete;
  ForeignArena& operator=(const ForeignArena&) = delete;

  // What its owner sees at `address`; nullptr if these bytes are not in the arena.
  const char* at(uintptr_t address, size_t bytes) const;
  // The same to write to, if it was mapped so.
  char* writable_at(uintptr_t address, size_t bytes) const {
    return access_ == Access::kWrite ? const_cast<char*>(at(address, bytes)) : nullptr;
  }

 private:
  ForeignArena(const char* memory, size_t bytes, Access access) : memory_(memory), bytes_(bytes), access_(access) {}

  const char* const memory_;
  const size_t bytes_;
  const Access access_;
};

} // namespace fog::shared_memory
