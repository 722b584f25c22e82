// Memory of this process that the other processes of its host can map, and read or write where it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fog::shared_memory {

// One anonymous, sparse file (memfd) of more bytes than the machine has memory; pages take memory once they were used. As
// the inbox, it leaves nothing behind. Blocks that were freed are kept with their pages and given out again to whoever asks
// for that size or somewhat less: fresh pages cost more than most operations. Those whose pages went back to the system are
// joined with their neighbors, and cut anew.
//
// A block of a page or more has pages of its own: when they go back to the system, no other block loses anything.
class Arena {
 public:
  // This process's; nullptr where the system has no memfd or no address space. Lives until the process ends.
  static Arena* instance();
  // How many processes of this host map each other's arenas. What is said before the first instance() counts; if nothing is, the
  // launcher's variables.
  static void expect_ranks(int local_ranks);

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

  // The arena's first bytes, for those who map it.
  struct Label {
    uint64_t magic;
    uint64_t token;
    uint64_t memory; // where the owner has it mapped
  };
  static constexpr uint64_t kMagic = 0x666f672d6172656e; // "fog-aren"
  // Maps all of an arena's file; nullptr if that fails. A core dump goes without: it would be as large as the file.
  static void* map_all(int fd, size_t bytes, int protection);

 private:
  Arena(int fd, char* memory, size_t bytes, uint32_t token);
  static Arena* create();
  // Blocks that have their pages, the smallest that serves; its size is what comes back in `size`.
  std::optional<size_t> take_kept(size_t& size);
  // Less than a page: one of many in the same pages, which are never given back.
  std::optional<size_t> take_small(size_t size);
  // Whole pages, without memory so far.
  std::optional<size_t> take_pages(size_t size);
  void add_bare(size_t offset, size_t size);
  // A freed block keeps its pages.
  void keep(size_t offset, size_t size);
  // Gives the pages of a block back to the system; false if it would not have them.
  bool drop_pages(size_t offset, size_t size);
  void keep_no_more_than(size_t bytes);

  const int fd_;
  char* const memory_;
  const size_t bytes_;
  const uint32_t token_;
  const size_t page_;
  bool forked_ = false;
  std::mutex mutex_;
  size_t end_; // behind it are pages that nobody has had, or that are free again
  size_t small_next_ = 0; // small blocks are cut from here
  size_t small_end_ = 0;
  size_t in_use_ = 0;
  size_t kept_bytes_ = 0; // of freed blocks that still have their pages
  std::unordered_map<size_t, size_t> sizes_; // by offset: of blocks in use
  std::map<size_t, std::vector<size_t>> kept_; // offsets of those blocks by size; none is empty
  std::map<size_t, size_t> bare_; // by offset: sizes of free stretches of pages without memory, no two side by side
  std::set<std::pair<size_t, size_t>> bare_sizes_; // the same as (size, offset)
};

} // namespace fog::shared_memory
