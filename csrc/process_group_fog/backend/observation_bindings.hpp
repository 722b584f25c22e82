// Python bindings for observing this process and others: the timeline, metrics, the flight record.
#pragma once

#include <pybind11/pybind11.h>

#include "backend/process_group_fog.hpp"

namespace fog {

void bind_observation(
    pybind11::module_& module, pybind11::class_<ProcessGroupFog, c10d::Backend, c10::intrusive_ptr<ProcessGroupFog>>& group);

} // namespace fog
