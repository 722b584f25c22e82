// How a tensor is cut into one slice a rank.
#pragma once

#include <cstddef>

namespace fog {

// Slice `index` of `count` nearly equal slices of `numel` elements.
struct Slice {
  size_t begin;
  size_t numel;
};

inline Slice slice_of(size_t numel, int index, int count) {
  const size_t begin = numel * static_cast<size_t>(index) / static_cast<size_t>(count);
  const size_t end = numel * (static_cast<size_t>(index) + 1) / static_cast<size_t>(count);
  return {begin, end - begin};
}

} // namespace fog
