// The memory of one rank's window: what it shares with its neighbors of this host.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/futex.hpp"
#include "transport/shared_memory/foreign_arena.hpp"
#include "windows/pair_mutex.hpp"
#include "windows/slot.hpp"

namespace fog {

class WindowPool;

// What an owner and one of its neighbors have to settle between them.
struct alignas(64) PeerControl {
  // Of the slot of this neighbor, for the users of both sides: the owner is the first side.
  PairMutex mutex;
  // Of the owner's tensor: held while the owner changes it, and by a neighbor that reads it and could not do so otherwise.
  PairMutex tensor;
  // Of this neighbor, that the owner has not waited for yet: a futex.
  std::atomic<uint32_t> signals;
  // From when this neighbor knows the owner's memory until it has ended its use of it.
  std::atomic<uint32_t> used;

  void signal() {
    signals.fetch_add(1, std::memory_order_release);
    futex_wake(signals);
  }
};

struct alignas(64) SlotPlace {
  Slot slot;
  std::atomic<uintptr_t> writers; // the writer's buffers, one after the other, where the owner has them mapped
  std::atomic<uintptr_t> owners; // the owner's, which are there once it has used them
};

// Addresses are those of the owner, which a view of another process translates.
struct alignas(64) WindowLabel {
  uint64_t magic;
  uint32_t slots;
  uint32_t peers;
  uint64_t bytes; // of the tensor
  uint64_t stride; // from one buffer to the next
  uintptr_t tensor;
  std::atomic<uint32_t> leaves; // futex: how many neighbors have ended their use
  std::atomic<uint64_t> changes; // of the tensor by its owner's update: odd while one is on its way
};

// How this process sees the window of a rank: its own, or a neighbor's.
class WindowView {
 public:
  WindowView() = default;
  // A neighbor's, at an address(); nullptr if it cannot be mapped for writing, or is not one of so many bytes, slots and peers.
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
  // Buffer `index`, as Slot numbers them, of a slot; not of one without value.
  char* buffer(const SlotPlace& place, unsigned index) const;
  char* tensor() const {
    return at(label_->tensor, label_->bytes);
  }
  // Tells the owner that the neighbor of control `index` has ended its use.
  void leave(size_t index) const;

 protected:
  static constexpr uint64_t kMagic = 0x666f672d77696e64; // "fog-wind"
  WindowLabel* label_ = nullptr;

 private:
  char* at(uintptr_t address, size_t bytes) const;

  std::shared_ptr<const shared_memory::ForeignArena> arena_; // null: this process's own memory
};

// This process's own. The memory is given back when this is destroyed.
class WindowMemory : public WindowView {
 public:
  // For a tensor of `bytes` at `tensor`, with so many slots and peers; nullptr if there is no memory. `pool` has the label if some peers reach
  // this process's pool; else it is null.
  static std::unique_ptr<WindowMemory> create(void* tensor, size_t bytes, size_t slots, size_t peers, std::unique_ptr<WindowPool> pool);
  // So many bytes the label has, with what follows it.
  static size_t bytes_of(size_t slots, size_t peers) {
    return sizeof(WindowLabel) + slots * sizeof(SlotPlace) + peers * sizeof(PeerControl);
  }
  ~WindowMemory();
  WindowMemory(const WindowMemory&) = delete;
  WindowMemory& operator=(const WindowMemory&) = delete;

  // Where peers of this host find it; empty if they cannot.
  std::string address() const;
  // Gives a slot the owner's buffers, if it has none yet; false if there is no memory.
  bool provide_owners_buffers(SlotPlace& place);
  // Whether no neighbor uses this memory any more.
  bool unused() const;
  // Null if no peer reaches it.
  const WindowPool* pool() const {
    return pool_.get();
  }

 private:
  explicit WindowMemory(std::unique_ptr<WindowPool> pool);
  void* allocate(size_t bytes);

  const std::unique_ptr<WindowPool> pool_;
  std::vector<void*> blocks_; // of the arena
  std::vector<std::unique_ptr<char[]>> private_blocks_; // where the system has none
};

} // namespace fog
