// Cutting a tensor into slices.
#pragma once

#include <cstddef>
#include <vector>

namespace fog {

struct Slice {
  size_t begin;
  size_t numel;
};

// Slice `index` of `count` nearly equal slices of `numel` elements.
inline Slice slice_of(size_t numel, int index, int count) {
  const size_t begin = numel * static_cast<size_t>(index) / static_cast<size_t>(count);
  const size_t end = numel * (static_cast<size_t>(index) + 1) / static_cast<size_t>(count);
  return {begin, end - begin};
}

// Consecutive slices; the k-th reaches from bounds[k] to bounds[k + 1].
struct Cut {
  std::vector<size_t> bounds;

  int count() const {
    return static_cast<int>(bounds.size()) - 1;
  }
  // The union of `many` slices from `first` on.
  Slice part(int first, int many = 1) const {
    return {bounds[first], bounds[first + many] - bounds[first]};
  }
};

// Nearly equal slices.
inline Cut cut(Slice whole, int count) {
  Cut slices;
  slices.bounds.reserve(static_cast<size_t>(count) + 1);
  for (int index = 0; index < count; ++index) {
    slices.bounds.push_back(whole.begin + slice_of(whole.numel, index, count).begin);
  }
  slices.bounds.push_back(whole.begin + whole.numel);
  return slices;
}

} // namespace fog
