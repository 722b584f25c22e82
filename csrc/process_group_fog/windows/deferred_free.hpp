// Keeps the memory of windows that were dropped without free() while neighbors may still write to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <c10/core/Storage.h>

#include "engine/engine.hpp"
#include "windows/window_memory.hpp"

namespace fog {

// Keeps the memory until the neighbors have left it or their processes have ended.
class DeferredFree {
 public:
  struct User {
    PeerId peer;
    size_t place; // index in the memory's controls
    bool tells; // it announces that it has left before it closes its group
  };
  using Users = std::vector<User>;
  struct Name { // identifies a window
    uint64_t group;
    uint64_t number;
  };

  // Must be called before the engine forgets the window, so that no news of a neighbor's leave is missed. The window
  // may keep a reference to the memory while it still uses it.
  static void keep(Engine& engine, Name name, std::shared_ptr<WindowMemory> memory, const c10::Storage& storage, Users users);
  // Call when the process has said that it has left this window.
  static void left(const Engine& engine, Name name, PeerId peer);
  // Call when the process has closed the group.
  static void left(const Engine& engine, uint64_t group, PeerId peer);
  // Returns whether neighbors may still use a tensor in that storage.
  static bool keeps(const c10::Storage& storage);
  // The number of windows whose memory is kept.
  static size_t size();
};

} // namespace fog
