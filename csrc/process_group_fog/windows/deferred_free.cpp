#include "windows/deferred_free.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <mutex>

namespace fog {
namespace {

struct Kept {
  const Engine* engine;
  DeferredFree::Name name;
  std::shared_ptr<WindowMemory> memory;
  c10::Storage storage;
  DeferredFree::Users users;
};

// Never destroyed, so the order of destruction at the process's end does not matter.
auto& mutex = *new std::mutex;
auto& kept = *new std::vector<Kept>;

using User = DeferredFree::User;

// Marks the users that have left according to `has_left`, and frees the memory that has no users left.
void release(const std::function<bool(const Kept& window, const User& user)>& has_left) {
  std::vector<Kept> released; // freed after the lock is released
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& window : kept) {
    for (const auto& user : window.users) {
      if (has_left(window, user)) {
        window.memory->leave(user.place);
      }
    }
  }
  const auto unused = std::stable_partition(kept.begin(), kept.end(), [](const Kept& window) { return !window.memory->unused(); });
  std::move(unused, kept.end(), std::back_inserter(released));
  kept.erase(unused, kept.end());
}

void release(PeerId ended) {
  release([ended](const Kept&, const User& user) { return user.peer == ended; });
}

} // namespace

void DeferredFree::keep(Engine& engine, Name name, std::shared_ptr<WindowMemory> memory, const c10::Storage& storage, Users users) {
  engine.set_ended_listener([](PeerId peer) { release(peer); });
  {
    const std::lock_guard<std::mutex> lock(mutex);
    kept.push_back({&engine, name, std::move(memory), storage, users});
  }
  // From now on release() is called for users that end; some may have ended before.
  for (const auto& user : users) {
    if (const auto its = engine.peer(user.peer); !its.is_alive() && !its.is_silent()) {
      release(user.peer);
    }
  }
  release(-1);
}

void DeferredFree::left(const Engine& engine, Name name, PeerId peer) {
  release([&](const Kept& window, const User& user) {
    return user.peer == peer && window.engine == &engine && window.name.group == name.group && window.name.number == name.number;
  });
}

void DeferredFree::left(const Engine& engine, uint64_t group, PeerId peer) {
  release([&](const Kept& window, const User& user) {
    return user.peer == peer && user.tells && window.engine == &engine && window.name.group == group;
  });
}

bool DeferredFree::keeps(const c10::Storage& storage) {
  const std::lock_guard<std::mutex> lock(mutex);
  return std::any_of(kept.begin(), kept.end(), [&](const Kept& window) { return window.storage.is_alias_of(storage); });
}

size_t DeferredFree::size() {
  const std::lock_guard<std::mutex> lock(mutex);
  return kept.size();
}

} // namespace fog
