// Memory of windows that were dropped, not freed, while neighbors may still write to it.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <c10/core/Storage.h>

#include "engine/engine.hpp"
#include "windows/window_memory.hpp"

namespace fog {

// It keeps the memory until they have left it, or their processes have ended.
class DeferredFree {
 public:
  using Users = std::vector<std::pair<PeerId, size_t>>; // with their places in the memory

  static void keep(Engine& engine, std::unique_ptr<WindowMemory> memory, const c10::Storage& storage, Users users);
  // So many windows are kept.
  static size_t size();
};

} // namespace fog
