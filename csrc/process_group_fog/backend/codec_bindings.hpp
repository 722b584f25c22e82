#pragma once

#include <memory>

#include <torch/csrc/utils/pybind.h>

#include "core/codecs/codecs.hpp"

namespace fog {

// pybind11 knows no shared pointers to constant objects. Python cannot change a codec.
using BoundCodec = std::shared_ptr<Codec>;

// Binds the class Codec and the functions that make codecs.
void bind_codecs(pybind11::module_& module);

} // namespace fog
