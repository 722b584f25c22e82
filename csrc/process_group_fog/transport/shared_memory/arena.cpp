#include "transport/shared_memory/arena.hpp"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <new>
#include <random>
#include <tuple>

#include "core/settings.hpp"
#include "transport/shared_memory/machine.hpp"
#include "transport/shared_memory/memfd.hpp"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(memory, bytes) (void(memory), void(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(memory, bytes) (void(memory), void(bytes))
#endif

namespace fog::shared_memory {
namespace {

constexpr size_t kLine = 64;
// Address space that is used for others' arenas.
std::atomic<size_t> mapped_bytes{0};
// Freed blocks keep their pages up to the number of bytes in use, or this number if it is larger.
constexpr size_t kLeastKept = size_t(256) << 20;
// A freed block serves requests down to its size divided by this, so that few blocks serve requests of varying sizes.
constexpr size_t kMostWaste = 2;
// Small blocks are cut from stretches of this size.
constexpr size_t kSmallStretch = size_t(64) << 10;
// An arena below this size is useless.
constexpr size_t kLeast = size_t(1) << 20;
// The assumed number of local ranks if it is not known. That many ranks get arenas of 1 TiB each.
constexpr int kManyRanks = 64;

int expected_ranks = 0;

int local_ranks() {
  const int ranks = expected_ranks > 0 ? expected_ranks : settings().local_ranks;
  return ranks > 0 ? ranks : kManyRanks;
}

size_t rounded_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// There are few sizes, eight from each power of two to the next, so that freed blocks fit later requests.
size_t block_size(size_t bytes, size_t page) {
  size_t step = kLine;
  while (step * 16 <= bytes) {
    step *= 2;
  }
  const size_t size = std::max(kLine, rounded_up(bytes, step));
  return size < page ? size : rounded_up(size, page);
}

} // namespace

void* Arena::map_all(int fd, size_t bytes, int protection) {
  void* memory = map_memfd(fd, bytes, protection, MAP_NORESERVE);
  if (memory != nullptr) {
    madvise(memory, bytes, MADV_DONTDUMP);
  }
  return memory;
}

Arena* Arena::instance() {
  static Arena* const arena = create();
  return arena;
}

void Arena::expect_ranks(int local_ranks) {
  expected_ranks = local_ranks;
}

Arena* Arena::create() {
  const size_t page = machine().page;
  // A system with fewer addresses, or with a limit on the size of files, may only have room for less.
  for (size_t bytes = arena_bytes(machine().memory, local_ranks(), address_space()); bytes >= std::max(kLeast, 4 * page);
       bytes = bytes / 2 / page * page) {
    const int fd = create_memfd("fog_arena", bytes);
    void* memory = fd < 0 ? nullptr : map_all(fd, bytes, PROT_READ | PROT_WRITE);
    if (memory == nullptr) {
      if (fd >= 0) {
        close(fd);
      }
      continue;
    }
    const uint32_t token = std::random_device()();
    *static_cast<Label*>(memory) = {kMagic, token, reinterpret_cast<uintptr_t>(memory)};
    auto* arena = new Arena(fd, static_cast<char*>(memory), bytes, token);
    // A forked child shares the pages with its parent, but does not know which of them are free.
    static Arena* parents = arena;
    pthread_atfork(nullptr, nullptr, [] { parents->forked_ = true; });
    return arena;
  }
  return nullptr;
}

Arena::Arena(int fd, char* memory, size_t bytes, uint32_t token)
    : fd_(fd), memory_(memory), bytes_(bytes), token_(token), page_(machine().page), end_(page_) {}

void* Arena::allocate(size_t bytes) {
  if (forked_ || bytes > bytes_) {
    return nullptr;
  }
  size_t size = block_size(bytes, page_);
  const std::lock_guard<std::mutex> lock(mutex_);
  auto offset = take_kept(size);
  if (!offset) {
    offset = size < page_ ? take_small(size) : take_pages(size);
  }
  if (!offset) { // free memory may be in the pages of kept blocks
    keep_no_more_than(0);
    offset = size < page_ ? take_small(size) : take_pages(size);
  }
  if (!offset) {
    return nullptr;
  }
  sizes_.emplace(*offset, size);
  in_use_ += size;
  ASAN_POISON_MEMORY_REGION(memory_ + *offset + bytes, size - bytes);
  ASAN_UNPOISON_MEMORY_REGION(memory_ + *offset, bytes);
  return memory_ + *offset;
}

std::optional<size_t> Arena::take_kept(size_t& size) {
  const auto found = kept_.lower_bound(size);
  if (found == kept_.end() || found->first > kMostWaste * size) {
    return std::nullopt;
  }
  size = found->first;
  const size_t offset = found->second.back();
  found->second.pop_back();
  if (found->second.empty()) {
    kept_.erase(found);
  }
  kept_bytes_ -= size;
  return offset;
}

std::optional<size_t> Arena::take_small(size_t size) {
  if (small_end_ - small_next_ < size) {
    const size_t stretch = rounded_up(kSmallStretch, page_);
    const auto fresh = take_pages(stretch);
    if (!fresh) {
      return std::nullopt;
    }
    if (const size_t rest = small_end_ - small_next_; rest > 0) {
      keep(small_next_, rest);
    }
    small_next_ = *fresh;
    small_end_ = *fresh + stretch;
  }
  return std::exchange(small_next_, small_next_ + size);
}

std::optional<size_t> Arena::take_pages(size_t size) {
  const auto found = bare_sizes_.lower_bound({size, 0});
  if (found == bare_sizes_.end()) {
    if (size > bytes_ - end_) {
      return std::nullopt;
    }
    return std::exchange(end_, end_ + size);
  }
  const auto [free, offset] = *found;
  bare_sizes_.erase(found);
  bare_.erase(offset);
  if (free > size) {
    bare_.emplace(offset + size, free - size);
    bare_sizes_.emplace(free - size, offset + size);
  }
  return offset;
}

void Arena::add_bare(size_t offset, size_t size) {
  const auto remove = [this](std::map<size_t, size_t>::iterator position) {
    bare_sizes_.erase({position->second, position->first});
    bare_.erase(position);
  };
  if (const auto next = bare_.find(offset + size); next != bare_.end()) {
    size += next->second;
    remove(next);
  }
  if (auto before = bare_.lower_bound(offset); before != bare_.begin()) {
    --before;
    if (before->first + before->second == offset) {
      offset = before->first;
      size += before->second;
      remove(before);
    }
  }
  if (offset + size == end_) {
    end_ = offset;
    return;
  }
  bare_.emplace(offset, size);
  bare_sizes_.emplace(size, offset);
}

void Arena::free(void* memory) {
  if (forked_) {
    return;
  }
  const auto offset = static_cast<size_t>(static_cast<char*>(memory) - memory_);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = sizes_.find(offset);
  const size_t size = found->second;
  ASAN_POISON_MEMORY_REGION(memory, size);
  sizes_.erase(found);
  in_use_ -= size;
  const size_t most = std::max(kLeastKept, in_use_);
  try {
    if (size >= page_ && kept_bytes_ + size > most && drop_pages(offset, size)) {
      add_bare(offset, size);
    } else {
      keep(offset, size);
    }
    keep_no_more_than(most); // the limit, which is lower now
  } catch (const std::bad_alloc&) { // freeing cannot fail: memory that cannot be recorded as free is not used again
  }
}

void Arena::keep(size_t offset, size_t size) {
  const auto place = kept_.try_emplace(size).first;
  try {
    place->second.push_back(offset);
  } catch (const std::bad_alloc&) {
    if (place->second.empty()) {
      kept_.erase(place);
    }
    throw;
  }
  kept_bytes_ += size;
}

void Arena::keep_no_more_than(size_t bytes) {
  for (auto position = kept_.end(); kept_bytes_ > bytes && position != kept_.begin();) {
    --position;
    const size_t size = position->first;
    if (size < page_) {
      return;
    }
    bool more = true;
    while (more && kept_bytes_ > bytes && drop_pages(position->second.back(), size)) {
      const size_t offset = position->second.back();
      position->second.pop_back();
      kept_bytes_ -= size;
      more = !position->second.empty();
      if (!more) {
        position = kept_.erase(position);
      }
      add_bare(offset, size); // it is no longer among the kept blocks, even if there is no memory to record it here
    }
  }
}

bool Arena::drop_pages(size_t offset, size_t size) {
  return madvise(memory_ + offset, size, MADV_REMOVE) == 0;
}

bool Arena::contains(const void* data, size_t bytes) const {
  const auto* begin = static_cast<const char*>(data);
  return !forked_ && begin >= memory_ && begin < memory_ + bytes_ && bytes <= static_cast<size_t>(memory_ + bytes_ - begin);
}

// --- of another process ---

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
