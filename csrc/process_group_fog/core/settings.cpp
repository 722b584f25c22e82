#include "core/settings.hpp"

#include <mutex>
#include <utility>

namespace fog {
namespace {

std::mutex mutex;
Settings current;

} // namespace

Settings settings() {
  const std::lock_guard<std::mutex> lock(mutex);
  return current;
}

void set_settings(Settings changed) {
  const std::lock_guard<std::mutex> lock(mutex);
  current = std::move(changed);
}

} // namespace fog
