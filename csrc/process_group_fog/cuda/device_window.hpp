// Which window a device's tensors get.
#pragma once

#include <memory>

#include "windows/window.hpp"

namespace fog::cuda {

// Collective. A PeerWindow where every rank's device reaches the memory of its neighbors, else a StagedWindow: the same on
// all ranks. Throws ValueError on every rank if they disagree.
std::shared_ptr<Window> create_window(Window::Recipe recipe, const Window::Gather& gather);

} // namespace fog::cuda
