#include "core/python_lock.hpp"

#include <utility>

namespace fog {
namespace {

std::function<void(const std::function<void()>&)>& without_lock() {
  // never destroyed: threads may still run when the process ends
  static auto* function = new std::function<void(const std::function<void()>&)>;
  return *function;
}

} // namespace

void without_python_lock(const std::function<void()>& function) {
  without_lock() ? without_lock()(function) : function();
}

void set_python_lock(std::function<void(const std::function<void()>&)> function) {
  without_lock() = std::move(function);
}

} // namespace fog
