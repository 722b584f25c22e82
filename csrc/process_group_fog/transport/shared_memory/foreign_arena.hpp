// The arenas of other processes of this host, as mapped by this process.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace fog::shared_memory {

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
