#include "windows/window_memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <sstream>

#include "transport/shared_memory/arena.hpp"
#include "transport/futex.hpp"
#include "transport/shared_memory/machine.hpp"
#include "windows/window_pool.hpp"

namespace fog {
namespace {

constexpr size_t kLine = 64;

} // namespace

char* WindowView::at(uintptr_t address, size_t bytes) const {
  return arena_ ? arena_->writable_at(address, bytes) : reinterpret_cast<char*>(address);
}

char* WindowView::buffer(const SlotPlace& place, unsigned index) const {
  const bool writers = index < Slot::kWriters;
  const auto& first = writers ? place.writers : place.owners;
  return at(first.load(std::memory_order_acquire) + (writers ? index : index - Slot::kWriters) * label_->stride, label_->bytes);
}

void WindowView::leave(size_t index) const {
  if (control(index).used.exchange(0) != 0) {
    label_->leaves.fetch_add(1);
    futex_wake(label_->leaves);
  }
}

void* WindowMemory::allocate(size_t bytes) {
  auto* arena = shared_memory::Arena::instance();
  if (auto* memory = arena != nullptr ? arena->allocate(bytes) : nullptr) {
    blocks_.push_back(memory);
    return memory;
  }
  private_blocks_.emplace_back(new (std::nothrow) char[bytes + kLine]);
  const auto address = reinterpret_cast<uintptr_t>(private_blocks_.back().get());
  return address == 0 ? nullptr : reinterpret_cast<void*>((address + kLine - 1) / kLine * kLine);
}

WindowMemory::WindowMemory(std::unique_ptr<WindowPool> pool) : pool_(std::move(pool)) {}

std::unique_ptr<WindowMemory> WindowMemory::create(
    void* tensor, size_t bytes, size_t slots, size_t peers, std::unique_ptr<WindowPool> pool) {
  auto memory = std::unique_ptr<WindowMemory>(new WindowMemory(std::move(pool)));
  auto* place = memory->pool_ ? memory->pool_->label() : memory->allocate(bytes_of(slots, peers));
  if (place == nullptr) {
    return nullptr;
  }
  const size_t page = shared_memory::machine().page;
  const size_t alignment = bytes >= page ? page : kLine;
  auto* label = new (place) WindowLabel();
  label->magic = kMagic;
  label->slots = static_cast<uint32_t>(slots);
  label->peers = static_cast<uint32_t>(peers);
  label->bytes = bytes;
  label->stride = (bytes + alignment - 1) / alignment * alignment;
  label->tensor = reinterpret_cast<uintptr_t>(tensor);
  memory->label_ = label;
  for (size_t i = 0; i < slots; ++i) {
    auto* slot = new (&memory->slot(i)) SlotPlace();
    slot->slot.start(std::nullopt);
    auto* buffers = memory->allocate(Slot::kWriters * std::max<size_t>(label->stride, 1));
    if (buffers == nullptr) {
      return nullptr;
    }
    slot->writers.store(reinterpret_cast<uintptr_t>(buffers));
  }
  for (size_t i = 0; i < peers; ++i) {
    new (&memory->control(i)) PeerControl();
  }
  return memory;
}

WindowMemory::~WindowMemory() {
  for (auto* block : blocks_) {
    shared_memory::Arena::instance()->free(block);
  }
}

std::string WindowMemory::address() const {
  const auto* arena = shared_memory::Arena::instance();
  const auto in_arena = [arena](const void* data, size_t bytes) { return arena != nullptr && arena->contains(data, bytes); };
  if (!private_blocks_.empty() || !in_arena(label_, 1) || !in_arena(reinterpret_cast<const void*>(label_->tensor), label_->bytes)) {
    return "";
  }
  std::ostringstream address;
  address << getpid() << ' ' << arena->fd() << ' ' << arena->token() << ' ' << reinterpret_cast<uintptr_t>(label_);
  return address.str();
}

bool WindowMemory::provide_owners_buffers(SlotPlace& place) {
  if (place.owners.load() == 0) {
    const bool shared = private_blocks_.empty();
    auto* buffers = allocate(Slot::kOwners * std::max<size_t>(label_->stride, 1));
    // a writer that has mapped the window must be able to map these too
    if (buffers == nullptr || (shared && !private_blocks_.empty())) {
      return false;
    }
    place.owners.store(reinterpret_cast<uintptr_t>(buffers), std::memory_order_release);
  }
  return true;
}

bool WindowMemory::unused() const {
  for (size_t i = 0; i < label_->peers; ++i) {
    if (control(i).used.load() != 0) {
      return false;
    }
  }
  return true;
}

std::unique_ptr<WindowView> WindowView::attach(const std::string& address, size_t bytes, size_t slots, size_t peers) {
  std::istringstream fields(address);
  int pid = 0;
  int fd = 0;
  uint32_t token = 0;
  uintptr_t label = 0;
  if (!(fields >> pid >> fd >> token >> label)) {
    return nullptr;
  }
  auto arena = shared_memory::ForeignArena::map(pid, fd, token);
  if (!arena || !arena->make_writable()) {
    return nullptr;
  }
  auto window = std::make_unique<WindowView>();
  window->arena_ = std::move(arena);
  window->label_ = reinterpret_cast<WindowLabel*>(window->at(label, sizeof(WindowLabel)));
  const bool fits = window->label_ != nullptr && window->label_->magic == kMagic && window->label_->slots == slots &&
      window->label_->peers == peers && window->label_->bytes == bytes &&
      window->at(label, WindowMemory::bytes_of(slots, peers)) != nullptr && window->tensor() != nullptr;
  return fits ? std::move(window) : nullptr;
}

} // namespace fog
