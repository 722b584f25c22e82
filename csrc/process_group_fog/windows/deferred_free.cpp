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

// These are never destroyed: the process's end needs no order.
auto& mutex = *new std::mutex;
auto& kept = *new std::vector<Kept>;

// It gives back what nobody uses once that process does not use those windows for which `concerns` says so.
void release(PeerId peer, const std::function<bool(const Kept& window)>& concerns) {
  std::vector<Kept> released; // after the lock
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& window : kept) {
    for (const auto& [user, place] : window.users) {
      if (user == peer && concerns(window)) {
        window.memory->leave(place);
      }
    }
  }
  const auto unused = std::stable_partition(kept.begin(), kept.end(), [](const Kept& window) { return !window.memory->unused(); });
  std::move(unused, kept.end(), std::back_inserter(released));
  kept.erase(unused, kept.end());
}

void release(PeerId peer) {
  release(peer, [](const Kept&) { return true; });
}

} // namespace

void DeferredFree::keep(Engine& engine, Name name, std::shared_ptr<WindowMemory> memory, const c10::Storage& storage, Users users) {
  engine.set_ended_listener([](PeerId peer) { release(peer); });
  {
    const std::lock_guard<std::mutex> lock(mutex);
    kept.push_back({&engine, name, std::move(memory), storage, users});
  }
  // From now on this hears of those that end; some may have ended before.
  for (const auto& [peer, place] : users) {
    if (engine.has_left(peer)) {
      release(peer);
    }
  }
  release(-1);
}

void DeferredFree::left(const Engine& engine, uint64_t group, std::optional<uint64_t> number, PeerId peer) {
  release(peer, [&](const Kept& window) {
    return window.engine == &engine && window.name.group == group && (!number || window.name.number == *number);
  });
}

size_t DeferredFree::size() {
  const std::lock_guard<std::mutex> lock(mutex);
  return kept.size();
}

} // namespace fog
