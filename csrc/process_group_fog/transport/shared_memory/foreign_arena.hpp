// The arenas of other processes of this host, as this one maps them.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace fog::shared_memory {

// One mapping of a peer's arena serves messages and all windows. It is for reading, so that no fault of a reader's changes a
// neighbor's tensors, until the first window of this peer needs to write there.
class ForeignArena {
 public:
  // The arena of process `pid`, mapped at most once; nullptr if it cannot be mapped.
  static std::shared_ptr<ForeignArena> map(pid_t pid, int fd, uint32_t token);
  ~ForeignArena();
  ForeignArena(const ForeignArena&) = delete;
  ForeignArena& operator=(const ForeignArena&) = delete;

  // What its owner sees at `address`; nullptr if these bytes are not in the arena.
  const char* at(uintptr_t address, size_t bytes) const;
  // From now on all of it can be written to; false if the system refuses.
  bool make_writable();
  // As at(), once it is writable.
  char* writable_at(uintptr_t address, size_t bytes) const {
    return const_cast<char*>(at(address, bytes));
  }

 private:
  ForeignArena(char* memory, size_t bytes, uintptr_t owners_view) : memory_(memory), bytes_(bytes), owners_view_(owners_view) {}
  static std::shared_ptr<ForeignArena> map_now(pid_t pid, int fd, uint32_t token);

  char* const memory_;
  const size_t bytes_;
  const uintptr_t owners_view_; // where its owner has it mapped
  std::mutex mutex_;
  bool writable_ = false;
};

} // namespace fog::shared_memory
