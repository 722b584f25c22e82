#include "arena.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <string>

namespace fog::shared_memory {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kLine = 64;
// Offsets are never given back, so there are more of them than memory.
constexpr size_t kTimesMemory = 4;
// Pages kept for blocks to come: as many as are in use, but at least these.
constexpr size_t kLeastKept = size_t(256) << 20;
// A freed block serves for requests down to this part of its size: where sizes vary, few blocks serve them all.
constexpr size_t kMostWaste = 2;

// Of a process's 128 TiB of addresses, what others' arenas may take: the rest is its own.
constexpr size_t kMostForeign = size_t(32) << 40;
std::atomic<size_t> foreign_bytes{0};

// The arena's first page, for those who map it.
struct Label {
  uint64_t magic;
  uint64_t token;
  uint64_t memory; // where the owner has it mapped
};
constexpr uint64_t kMagic = 0x666f672d6172656e; // "fog-aren"

// Maps all of an arena's file; nullptr if that fails. A core dump goes without: it would be as large as the file.
void* map_all(int fd, size_t bytes, int protection) {
  void* memory = mmap(nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (memory == MAP_FAILED) {
    return nullptr;
  }
  madvise(memory, bytes, MADV_DONTDUMP);
  return memory;
}

// Few sizes, so that freed blocks fit those who come later: eight between a power of two and the next.
size_t block_size(size_t bytes) {
  size_t step = kLine;
  while (step * 16 <= bytes) {
    step *= 2;
  }
  return std::max(kLine, (bytes + step - 1) / step * step);
}

} // namespace

Arena* Arena::instance() {
  static Arena* const arena = create();
  return arena;
}

Arena* Arena::create() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const int fd = memfd_create("fog_arena", MFD_CLOEXEC);
  if (fd < 0 || pages <= 0) {
    return nullptr;
  }
  const size_t bytes = static_cast<size_t>(pages) * kPage * kTimesMemory;
  void* memory = ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? map_all(fd, bytes, PROT_READ | PROT_WRITE) : nullptr;
  if (memory == nullptr) {
    close(fd);
    return nullptr;
  }
  const uint32_t token = std::random_device()();
  *static_cast<Label*>(memory) = {kMagic, token, reinterpret_cast<uintptr_t>(memory)};
  auto* arena = new Arena(fd, static_cast<char*>(memory), bytes, token);
  // A forked child shares the pages with its parent, but not the knowledge of which are free.
  static Arena* parents = arena;
  pthread_atfork(nullptr, nullptr, [] { parents->forked_ = true; });
  return arena;
}

Arena::Arena(int fd, char* memory, size_t bytes, uint32_t token)
    : fd_(fd), memory_(memory), bytes_(bytes), token_(token), end_(kPage) {}

void* Arena::allocate(size_t bytes) {
  if (forked_) {
    return nullptr;
  }
  size_t size = block_size(bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto freed = freed_.lower_bound(size);
  size_t offset = 0;
  if (freed != freed_.end() && freed->first <= kMostWaste * size) {
    size = freed->first;
    auto& blocks = freed->second;
    kept_ -= blocks.with_pages.empty() ? 0 : size;
    auto& offsets = blocks.with_pages.empty() ? blocks.bare : blocks.with_pages;
    offset = offsets.back();
    offsets.pop_back();
    if (blocks.with_pages.empty() && blocks.bare.empty()) {
      freed_.erase(freed);
    }
  } else {
    offset = size >= kPage ? (end_ + kPage - 1) / kPage * kPage : end_;
    if (size > bytes_ || offset > bytes_ - size) {
      return nullptr;
    }
    end_ = offset + size;
  }
  sizes_.emplace(offset, size);
  in_use_ += size;
  return memory_ + offset;
}

void Arena::free(void* memory) {
  if (forked_) {
    return;
  }
  const auto offset = static_cast<size_t>(static_cast<char*>(memory) - memory_);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sizes_.find(offset);
  const size_t size = found->second;
  sizes_.erase(found);
  in_use_ -= size;
  const size_t most = std::max(kLeastKept, in_use_);
  if (size >= kPage && kept_ + size > most && drop_pages(offset, size)) {
    freed_[size].bare.push_back(offset);
  } else {
    freed_[size].with_pages.push_back(offset);
    kept_ += size;
  }
  keep_no_more_than(most); // that has become less
}

void Arena::keep_no_more_than(size_t bytes) {
  for (auto position = freed_.rbegin(); kept_ > bytes && position != freed_.rend() && position->first >= kPage; ++position) {
    auto& [size, blocks] = *position;
    while (kept_ > bytes && !blocks.with_pages.empty() && drop_pages(blocks.with_pages.back(), size)) {
      blocks.bare.push_back(blocks.with_pages.back());
      blocks.with_pages.pop_back();
      kept_ -= size;
    }
  }
}

bool Arena::drop_pages(size_t offset, size_t size) {
  const size_t begin = (offset + kPage - 1) / kPage * kPage; // smaller blocks may share the pages at its ends
  const size_t end = (offset + size) / kPage * kPage;
  return madvise(memory_ + begin, end - begin, MADV_REMOVE) == 0;
}

bool Arena::contains(const void* data, size_t bytes) const {
  const auto* begin = static_cast<const char*>(data);
  return !forked_ && begin >= memory_ && begin < memory_ + bytes_ && bytes <= static_cast<size_t>(memory_ + bytes_ - begin);
}

std::shared_ptr<ForeignArena> ForeignArena::map(int pid, int fd, uint32_t token, Access access) {
  const auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const bool write = access == Access::kWrite;
  const int opened = open(path.c_str(), (write ? O_RDWR : O_RDONLY) | O_CLOEXEC);
  if (opened < 0) {
    return nullptr;
  }
  struct stat status = {};
  const size_t bytes = fstat(opened, &status) == 0 ? static_cast<size_t>(status.st_size) : 0;
  const bool fits = foreign_bytes.fetch_add(bytes) + bytes <= kMostForeign;
  const int protection = PROT_READ | (write ? PROT_WRITE : 0);
  const void* memory = fits && bytes >= kPage ? map_all(opened, bytes, protection) : nullptr;
  close(opened);
  if (memory == nullptr) {
    foreign_bytes -= bytes;
    return nullptr;
  }
  auto arena = std::shared_ptr<ForeignArena>(new ForeignArena(static_cast<const char*>(memory), bytes, access));
  const auto* label = static_cast<const Label*>(memory);
  return label->magic == kMagic && label->token == token ? arena : nullptr;
}

ForeignArena::~ForeignArena() {
  munmap(const_cast<char*>(memory_), bytes_);
  foreign_bytes -= bytes_;
}

const char* ForeignArena::at(uintptr_t address, size_t bytes) const {
  const uintptr_t begin = reinterpret_cast<const Label*>(memory_)->memory;
  if (address < begin || address - begin > bytes_ || bytes > bytes_ - (address - begin)) {
    return nullptr;
  }
  return memory_ + (address - begin);
}

} // namespace fog::shared_memory
