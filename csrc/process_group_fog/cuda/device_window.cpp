#include "windows/window_service.hpp"
#include "cuda/device_window.hpp"

#include <algorithm>

#include <c10/core/DeviceType.h>

#include "engine/engine.hpp"
#include "core/failure.hpp"
#include "windows/window_descriptions.hpp"
#include "cuda/kernels.hpp"
#include "cuda/peer_window.hpp"
#include "cuda/staged_window.hpp"

namespace fog::cuda {
namespace {

void say_why(const at::Device& device, const std::exception& reason) {
  TORCH_WARN_ONCE("fog: windows of tensors on ", device, " go through the host's memory: ", message_of(reason));
}

// Memory that the neighbors may map; null if they or this rank's device cannot do that.
std::shared_ptr<PeerMemory> offer_memory(const Window::Recipe& recipe) {
  const auto& group = *recipe.group;
  const auto all = all_neighbors(recipe.in_neighbors, recipe.out_neighbors);
  const bool one_host =
      std::all_of(all.begin(), all.end(), [&](int rank) { return group.members[rank].host == group.members[group.rank].host; });
  if (!one_host || recipe.in_neighbors.size() > PeerWindow::kMostSlots) {
    return nullptr;
  }
  try {
    prepare_kernels(recipe.tensor.device());
    return std::make_shared<PeerMemory>(recipe.tensor.device(), PeerLayout(recipe.tensor, recipe.in_neighbors.size(), all.size()));
  } catch (const std::exception& reason) { // no driver, no run-time compiler, or no memory
    say_why(recipe.tensor.device(), reason);
    return nullptr;
  }
}

} // namespace

std::shared_ptr<Window> create_window(Window::Recipe recipe, const Window::Gather& gather) {
  WindowDescription mine;
  mine.number = WindowService::of(*recipe.group).next_window(*recipe.group);
  mine.name = recipe.name;
  mine.in = recipe.in_neighbors;
  mine.out = recipe.out_neighbors;
  std::shared_ptr<PeerMemory> memory;
  std::exception_ptr error;
  try {
    Window::check_recipe(recipe);
    mine.layout = layout_of(recipe.tensor) + " on " + c10::DeviceTypeName(recipe.tensor.device().type(), true);
    memory = offer_memory(recipe);
    if (memory) {
      try {
        mine.address = memory->address();
      } catch (const std::exception& reason) { // it cannot be shared
        say_why(recipe.tensor.device(), reason);
        memory.reset();
      }
    }
  } catch (const std::exception& reason) { // the others, who wait for this rank, are to hear of it
    error = std::current_exception();
    mine.error = message_of(reason);
  }
  const auto descriptions = decode_descriptions(gather(encode(mine)), recipe.group->size());
  if (error) {
    std::rethrow_exception(error);
  }
  check_agreement(descriptions);
  const bool offered =
      std::all_of(descriptions.begin(), descriptions.end(), [](const WindowDescription& rank) { return !rank.address.empty(); });
  if (offered) {
    std::vector<std::unique_ptr<ForeignPeerMemory>> views;
    std::string opened = "1";
    try {
      for (const int rank : all_neighbors(recipe.in_neighbors, recipe.out_neighbors)) {
        views.push_back(std::make_unique<ForeignPeerMemory>(recipe.tensor.device(), descriptions[rank].address));
      }
    } catch (const std::exception& reason) { // this device does not reach that one
      say_why(recipe.tensor.device(), reason);
      opened = "0";
    }
    if (gather(opened).find('0') == std::string::npos) {
      return PeerWindow::create(std::move(recipe), descriptions, std::move(memory), std::move(views), gather);
    }
    views.clear();
    gather(opened); // nobody has the others' memory mapped any more
  }
  memory.reset();
  return StagedWindow::create(std::move(recipe), gather);
}

} // namespace fog::cuda
