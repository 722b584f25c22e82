// Memory of this process that the other processes of its host can map, and read or write in place.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fog::shared_memory {

// One anonymous, sparse file (memfd), larger than the machine's memory. Pages take memory only after their first use.
// Like the inbox, it leaves nothing behind. Freed blocks keep their pages and are given out again to requests of that
// size or somewhat less, because fresh pages cost more than most operations. Blocks whose pages went back to the system
// are joined with their neighbors and can be divided in other ways.
//
// A block of a page or more has pages of its own, so giving its pages back does not affect other blocks.
class Arena {
 public:
  // Returns the arena of this process; nullptr if the system has no memfd or not enough address space. Never destroyed.
  static Arena* instance();
  // Sets the number of processes on this host that map each other's arenas. It must be called before the first
  // instance() to have an effect. Without it, the launcher's variables give the number.
  static void expect_ranks(int local_ranks);

  // Returns memory that is aligned to cache lines; nullptr if none is left, and in a forked child.
  void* allocate(size_t bytes);
  void free(void* memory);
  // Returns whether peers can read these bytes in the arena.
  bool contains(const void* data, size_t bytes) const;

  // The values that peers need to map it.
  int fd() const {
    return fd_;
  }
  uint32_t token() const {
    return token_;
  }

  // The arena's first bytes, which peers check after mapping it.
  struct Label {
    uint64_t magic;
    uint64_t token;
    uint64_t memory; // address at which the owner has mapped it
  };
  static constexpr uint64_t kMagic = 0x666f672d6172656e; // "fog-aren"
  // Maps the whole file of an arena; nullptr if that fails. It is left out of core dumps, which would otherwise be as
  // large as the file.
  static void* map_all(int fd, size_t bytes, int protection);

 private:
  Arena(int fd, char* memory, size_t bytes, uint32_t token);
  static Arena* create();
  // Takes the smallest suitable block that still has its pages, and sets `size` to its size.
  std::optional<size_t> take_kept(size_t& size);
  // Takes a block of less than a page. It shares pages with others, and these are never given back.
  std::optional<size_t> take_small(size_t size);
  // Takes whole pages that have no memory yet.
  std::optional<size_t> take_pages(size_t size);
  void add_bare(size_t offset, size_t size);
  // Keeps a freed block with its pages.
  void keep(size_t offset, size_t size);
  // Gives the pages of a block back to the system. Returns false if the system refuses.
  bool drop_pages(size_t offset, size_t size);
  void keep_no_more_than(size_t bytes);

  const int fd_;
  char* const memory_;
  const size_t bytes_;
  const uint32_t token_;
  const size_t page_;
  bool forked_ = false;
  std::mutex mutex_;
  size_t end_; // pages after it are unused, or free again
  size_t small_next_ = 0; // small blocks are cut from here
  size_t small_end_ = 0;
  size_t in_use_ = 0;
  size_t kept_bytes_ = 0; // size of freed blocks that still have their pages
  std::unordered_map<size_t, size_t> sizes_; // sizes of blocks in use, by offset
  std::map<size_t, std::vector<size_t>> kept_; // offsets of kept blocks, by size; no list is empty
  std::map<size_t, size_t> bare_; // free stretches of pages without memory: offset to size; adjacent ones are joined
  std::set<std::pair<size_t, size_t>> bare_sizes_; // the same stretches as (size, offset)
};

// The arenas of other processes of this host, as mapped by this process.

// One mapping of a peer's arena serves messages and all windows. It is read-only, so that an error in a reader cannot
// change a neighbor's tensors, until a window of this peer needs to write there.
class ForeignArena {
 public:
  // Returns the arena of process `pid`, which is mapped at most once; nullptr if it cannot be mapped.
  static std::shared_ptr<ForeignArena> map(pid_t pid, int fd, uint32_t token);
  ~ForeignArena();
  ForeignArena(const ForeignArena&) = delete;
  ForeignArena& operator=(const ForeignArena&) = delete;

  // Returns the data that its owner has at `address`; nullptr if these bytes are not in the arena.
  const char* at(uintptr_t address, size_t bytes) const;
  // Makes the whole mapping writable. Returns false if the system refuses.
  bool make_writable();
  // Like at(), once it is writable.
  char* writable_at(uintptr_t address, size_t bytes) const {
    return const_cast<char*>(at(address, bytes));
  }

 private:
  ForeignArena(char* memory, size_t bytes, uintptr_t owners_view) : memory_(memory), bytes_(bytes), owners_view_(owners_view) {}
  static std::shared_ptr<ForeignArena> map_now(pid_t pid, int fd, uint32_t token);

  char* const memory_;
  const size_t bytes_;
  const uintptr_t owners_view_; // address at which its owner has mapped it
  std::mutex mutex_;
  bool writable_ = false;
};

} // namespace fog::shared_memory
