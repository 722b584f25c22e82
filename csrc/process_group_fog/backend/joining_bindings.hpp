// The part of the Python module by which a process joins a job that runs already.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fog {

void bind_joining(pybind11::module_& module);

} // namespace fog
