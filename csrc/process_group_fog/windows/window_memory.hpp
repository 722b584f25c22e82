// The memory of one rank's window that it shares with its neighbors on this host.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/futex.hpp"
#include "transport/shared_memory/arena.hpp"
#include "windows/pair_mutex.hpp"
#include "windows/slot.hpp"

namespace fog {

class WindowPool;

// The state that an owner shares with one of its neighbors.
struct alignas(64) PeerControl {
  // For the slot of this neighbor, for users on both sides; the owner is the first side.
  PairMutex mutex;
  // For the owner's tensor: held while the owner changes it, and by a neighbor that failed to read it without the
  // mutex.
  PairMutex tensor;
  // A futex: the number of this neighbor's signals that the owner has not taken yet.
  std::atomic<uint32_t> signals;
  // Nonzero from the time when this neighbor may know the owner's memory until it has ended its use of it.
  std::atomic<uint32_t> used;

  void signal() {
    signals.fetch_add(1, std::memory_order_release);
    futex_wake(signals);
  }
};

struct alignas(64) SlotPlace {
  Slot slot;
  std::atomic<uintptr_t> writers; // the writer's buffers, one after the other, as mapped by the owner
  std::atomic<uintptr_t> owners; // the owner's buffers; null until it needs them
};

// The addresses are the owner's; a view in another process translates them.
struct alignas(64) WindowLabel {
  uint64_t magic;
  uint32_t slots;
  uint32_t peers;
  uint64_t bytes; // of the tensor
  uint64_t stride; // from one buffer to the next
  uintptr_t tensor;
  std::atomic<uint32_t> leaves; // futex: the number of neighbors that have ended their use
  std::atomic<uint64_t> changes; // counts changes of the tensor by its owner's update(); odd during a change
};

// A process's view of a window: its own, or a neighbor's.
class WindowView {
 public:
  WindowView() = default;
  // Maps a neighbor's window, at an address(). Returns nullptr if it cannot be mapped for writing, or has other numbers
  // of bytes, slots and peers.
  static std::unique_ptr<WindowView> attach(const std::string& address, size_t bytes, size_t slots, size_t peers);

  WindowLabel& label() const {
    return *label_;
  }
  SlotPlace& slot(size_t index) const {
    return reinterpret_cast<SlotPlace*>(label_ + 1)[index];
  }
  PeerControl& control(size_t index) const {
    return reinterpret_cast<PeerControl*>(reinterpret_cast<SlotPlace*>(label_ + 1) + label_->slots)[index];
  }
  // Buffer `index`, as Slot numbers them, of a slot; not for the empty states.
  char* buffer(const SlotPlace& place, unsigned index) const;
  char* tensor() const {
    return at(label_->tensor, label_->bytes);
  }
  // Tells the owner that the neighbor with control `index` has ended its use.
  void leave(size_t index) const;

 protected:
  static constexpr uint64_t kMagic = 0x666f672d77696e64; // "fog-wind"
  WindowLabel* label_ = nullptr;

 private:
  char* at(uintptr_t address, size_t bytes) const;

  std::shared_ptr<const shared_memory::ForeignArena> arena_; // null for this process's own memory
};

// The window memory of this process; freed on destruction.
class WindowMemory : public WindowView {
 public:
  // For a tensor of `bytes` at `tensor`, with these numbers of slots and peers. Returns nullptr if there is no memory.
  // `pool` holds the label if some peers reach this process's pool; otherwise it is null.
  static std::unique_ptr<WindowMemory> create(void* tensor, size_t bytes, size_t slots, size_t peers, std::unique_ptr<WindowPool> pool);
  // The bytes of the label and the data that follows it.
  static size_t bytes_of(size_t slots, size_t peers) {
    return sizeof(WindowLabel) + slots * sizeof(SlotPlace) + peers * sizeof(PeerControl);
  }
  ~WindowMemory();
  WindowMemory(const WindowMemory&) = delete;
  WindowMemory& operator=(const WindowMemory&) = delete;

  // The address for peers of this host; empty if they cannot map the memory.
  std::string address() const;
  // Allocates the owner's buffers of a slot, if it has none yet; returns false if there is no memory.
  bool provide_owners_buffers(SlotPlace& place);
  // Returns whether no neighbor uses this memory any more.
  bool unused() const;
  // Null if no peer reaches the pool.
  const WindowPool* pool() const {
    return pool_.get();
  }

 private:
  explicit WindowMemory(std::unique_ptr<WindowPool> pool);
  void* allocate(size_t bytes);

  const std::unique_ptr<WindowPool> pool_;
  std::vector<void*> blocks_; // in the arena
  std::vector<std::unique_ptr<char[]>> private_blocks_; // used if the system has no arena
};

} // namespace fog
