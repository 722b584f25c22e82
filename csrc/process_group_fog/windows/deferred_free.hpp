// Memory of windows that were dropped, not freed, while neighbors may still write to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <c10/core/Storage.h>

#include "engine/engine.hpp"
#include "windows/window_memory.hpp"

namespace fog {

// It keeps the memory until they have left it, or their processes have ended.
class DeferredFree {
 public:
  struct User {
    PeerId peer;
    size_t place; // in the memory
    bool tells; // that it has left, before it closes its group
  };
  using Users = std::vector<User>;
  struct Name { // of a window
    uint64_t group;
    uint64_t number;
  };

  // It is called before the engine forgets the window, so that no news of a neighbor's leave is missed. The window may have the memory as
  // well, as long as it uses it itself.
  static void keep(Engine& engine, Name name, std::shared_ptr<WindowMemory> memory, const c10::Storage& storage, Users users);
  // That process has told that it has left this window.
  static void left(const Engine& engine, Name name, PeerId peer);
  // It has closed the group.
  static void left(const Engine& engine, uint64_t group, PeerId peer);
  // Whether neighbors may still use a tensor in that storage.
  static bool keeps(const c10::Storage& storage);
  // So many windows are kept.
  static size_t size();
};

} // namespace fog
