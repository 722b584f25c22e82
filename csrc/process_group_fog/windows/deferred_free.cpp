#include "windows/deferred_free.hpp"

#include <algorithm>
#include <iterator>
#include <mutex>

namespace fog {
namespace {

struct Kept {
  std::unique_ptr<WindowMemory> memory;
  c10::Storage storage;
  DeferredFree::Users users;
};

// These are never destroyed: the process's end needs no order.
auto& mutex = *new std::mutex;
auto& kept = *new std::vector<Kept>;

// It gives back what nobody uses once that process does not.
void release(PeerId peer) {
  std::vector<Kept> released; // after the lock
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& window : kept) {
    for (const auto& [user, place] : window.users) {
      if (user == peer) {
        window.memory->leave(place);
      }
    }
  }
  const auto unused = std::stable_partition(kept.begin(), kept.end(), [](const Kept& window) { return !window.memory->unused(); });
  std::move(unused, kept.end(), std::back_inserter(released));
  kept.erase(unused, kept.end());
}

} // namespace

void DeferredFree::keep(Engine& engine, std::unique_ptr<WindowMemory> memory, const c10::Storage& storage, Users users) {
  engine.set_ended_listener([](PeerId peer) { release(peer); });
  {
    const std::lock_guard<std::mutex> lock(mutex);
    kept.push_back({std::move(memory), storage, users});
  }
  // From now on this hears of those that end; some may have ended before.
  for (const auto& [peer, place] : users) {
    if (engine.has_left(peer)) {
      release(peer);
    }
  }
  release(-1);
}

size_t DeferredFree::size() {
  const std::lock_guard<std::mutex> lock(mutex);
  return kept.size();
}

} // namespace fog
