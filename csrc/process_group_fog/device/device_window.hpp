// Which window a device's tensors get.
#pragma once

#include <memory>

#include "windows/window.hpp"

namespace fog::device {

// Collective. A StagedWindow; throws ValueError on every rank if they disagree, on the type of device too. Windows whose neighbors
// reach each other's device memory would be chosen here, once the ranks have agreed: torch's symmetric memory is the way to them.
std::shared_ptr<Window> create_window(Window::Recipe recipe, const Window::Gather& gather);

} // namespace fog::device
