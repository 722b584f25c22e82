// Python bindings of windows.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/process_group_fog.hpp"

namespace fog {

// Adds to the group's class the methods that create windows.
using GroupClass = pybind11::class_<ProcessGroupFog, c10d::Backend, c10::intrusive_ptr<ProcessGroupFog>>;
void bind_windows(pybind11::module_& module, GroupClass& group);

} // namespace fog
