#pragma once

#include <cstddef>

namespace fog {

// A part of a tensor on its way to or from one rank.
struct Part {
  void* data = nullptr;
  size_t bytes = 0;
};

// Copies what a rank sends to itself. Throws ValueError if the sizes differ.
void copy_own(const Part& from, const Part& to);

} // namespace fog
