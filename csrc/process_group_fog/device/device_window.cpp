#include "device/device_window.hpp"

#include <exception>

#include <c10/core/DeviceType.h>

#include "engine/engine.hpp"
#include "core/failure.hpp"
#include "windows/window_service.hpp"
#include "windows/window_descriptions.hpp"
#include "device/staged_window.hpp"

namespace fog::device {

std::shared_ptr<Window> create_window(Window::Recipe recipe, const Window::Gather& gather) {
  WindowDescription mine;
  mine.number = WindowService::of(*recipe.group).next_window(*recipe.group);
  mine.name = recipe.name;
  mine.in = recipe.in_neighbors;
  mine.out = recipe.out_neighbors;
  std::exception_ptr error;
  try {
    Window::check_recipe(recipe);
    mine.layout = layout_of(recipe.tensor) + " on " + c10::DeviceTypeName(recipe.tensor.device().type(), true);
  } catch (const std::exception& reason) { // the others, who wait for this rank, are to hear of it
    error = std::current_exception();
    mine.error = message_of(reason);
  }
  const auto descriptions = decode_descriptions(gather(encode(mine)), recipe.group->size());
  if (error) {
    std::rethrow_exception(error);
  }
  check_agreement(descriptions);
  return StagedWindow::create(std::move(recipe), gather);
}

} // namespace fog::device
