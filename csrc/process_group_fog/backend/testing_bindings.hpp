// Bindings for tests: inspection of internals, and replacements for the machine and the job.
#pragma once

#include <pybind11/pybind11.h>

namespace fog {

void bind_testing(pybind11::module_& module);

} // namespace fog
