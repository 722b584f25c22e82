// The parts of the Python module.
#pragma once

#include <memory>

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include "backend/process_group_fog.hpp"
#include "core/codecs/codecs.hpp"

namespace fog {

// pybind11 knows no shared pointers to constant objects. Python cannot change a codec.
using BoundCodec = std::shared_ptr<Codec>;
using GroupClass = pybind11::class_<ProcessGroupFog, c10d::Backend, c10::intrusive_ptr<ProcessGroupFog>>;

// The class Codec and the functions that make codecs.
void bind_codecs(pybind11::module_& module);
// Windows, and the methods of a group that create them.
void bind_windows(pybind11::module_& module, GroupClass& group);
// The observation of this process and others: the timeline, metrics, the flight record.
void bind_observation(pybind11::module_& module, GroupClass& group);
// What a process needs to join a job that runs already.
void bind_joining(pybind11::module_& module);

} // namespace fog
