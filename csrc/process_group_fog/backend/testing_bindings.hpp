// What tests look at, and what they put in place of the machine and of the job.
#pragma once

#include <pybind11/pybind11.h>

namespace fog {

void bind_testing(pybind11::module_& module);

} // namespace fog
