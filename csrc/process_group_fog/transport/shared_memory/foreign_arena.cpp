#include "transport/shared_memory/foreign_arena.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <tuple>

#include "transport/shared_memory/arena.hpp"
#include "transport/shared_memory/machine.hpp"
#include "transport/shared_memory/memfd.hpp"

namespace fog::shared_memory {
namespace {

// Address space that is used for others' arenas.
std::atomic<size_t> mapped_bytes{0};

} // namespace

std::shared_ptr<ForeignArena> ForeignArena::map(pid_t pid, int fd, uint32_t token) {
  static std::mutex mutex;
  static std::map<std::tuple<pid_t, int, uint32_t>, std::weak_ptr<ForeignArena>> known;
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto entry = known.begin(); entry != known.end();) { // entries of processes that have ended
    entry = entry->second.expired() ? known.erase(entry) : std::next(entry);
  }
  auto& entry = known[{pid, fd, token}];
  auto arena = entry.lock();
  if (!arena) {
    arena = map_now(pid, fd, token);
    entry = arena;
  }
  return arena;
}

std::shared_ptr<ForeignArena> ForeignArena::map_now(pid_t pid, int fd, uint32_t token) {
  size_t bytes = 0;
  const int opened = open_memfd(pid, fd, &bytes);
  if (opened < 0) {
    return nullptr;
  }
  const bool fits = bytes >= sizeof(Arena::Label) && mapped_bytes.fetch_add(bytes) + bytes <= address_space() / 2;
  void* memory = fits ? Arena::map_all(opened, bytes, PROT_READ) : nullptr;
  close(opened);
  if (memory == nullptr) {
    mapped_bytes -= bytes >= sizeof(Arena::Label) ? bytes : 0;
    return nullptr;
  }
  const auto label = *static_cast<const Arena::Label*>(memory);
  auto arena = std::shared_ptr<ForeignArena>(new ForeignArena(static_cast<char*>(memory), bytes, label.memory));
  return label.magic == Arena::kMagic && label.token == token ? arena : nullptr;
}

ForeignArena::~ForeignArena() {
  unmap_memfd(memory_, bytes_);
  mapped_bytes -= bytes_;
}

const char* ForeignArena::at(uintptr_t address, size_t bytes) const {
  if (address < owners_view_ || address - owners_view_ > bytes_ || bytes > bytes_ - (address - owners_view_)) {
    return nullptr;
  }
  return memory_ + (address - owners_view_);
}

bool ForeignArena::make_writable() {
  const std::lock_guard<std::mutex> lock(mutex_);
  writable_ = writable_ || mprotect(memory_, bytes_, PROT_READ | PROT_WRITE) == 0;
  return writable_;
}

} // namespace fog::shared_memory
