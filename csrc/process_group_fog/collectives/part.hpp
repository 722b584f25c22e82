#pragma once

#include <cstddef>

namespace fog {

// A part of a tensor that is sent to or received from one rank.
struct Part {
  void* data = nullptr;
  size_t bytes = 0;
};

// Copies the part that a rank sends to itself. Throws ValueError if the sizes differ.
void copy_own(const Part& from, const Part& to);

} // namespace fog
