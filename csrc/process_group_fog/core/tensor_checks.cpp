#include "core/tensor_checks.hpp"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

namespace fog {

void check_tensor(const char* op, const char* argument, const at::Tensor& tensor, const at::Device& device) {
  TORCH_CHECK_VALUE(tensor.defined(), op, ": ", argument, ": got an undefined tensor");
  TORCH_CHECK_VALUE(
      tensor.layout() == at::kStrided, op, ": ", argument, ": got a tensor of layout ", tensor.layout(), "; allowed are dense tensors");
  TORCH_CHECK_VALUE(
      tensor.device() == device, op, ": ", argument, ": got a tensor on ", tensor.device(), "; allowed are tensors on ", device);
  TORCH_CHECK_VALUE(
      !tensor.is_conj() && !tensor.is_neg(), op, ": ", argument,
      ": got a lazily conjugated or negated tensor; call resolve_conj().resolve_neg() first");
}

void check_output(const char* op, const char* argument, const at::Tensor& tensor, const at::Device& device) {
  check_tensor(op, argument, tensor, device);
  TORCH_CHECK_VALUE(
      !shares_with_itself(tensor), op, ": ", argument,
      ": got a tensor whose elements share memory (an expanded one?); results cannot be written to it, call clone() first");
}

const at::Tensor& only_tensor(const char* op, const char* argument, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(tensors.size() == 1, op, ": ", argument, ": got ", tensors.size(), " tensors; allowed is one per rank");
  return tensors[0];
}

const std::vector<at::Tensor>& only_list(const char* op, const char* argument, const std::vector<std::vector<at::Tensor>>& lists) {
  TORCH_CHECK_VALUE(lists.size() == 1, op, ": ", argument, ": got ", lists.size(), " lists of tensors; allowed is one per rank");
  return lists[0];
}

namespace {

// The memory of a tensor, from its first to its last element.
struct Span {
  const char* begin;
  const char* end;
};

Span span_of(const at::Tensor& tensor) {
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  if (tensor.is_contiguous()) {
    return {begin, begin + tensor.nbytes()};
  }
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

// The multiples of a stride, from `low` to `high` times.
struct Term {
  int64_t stride; // always positive
  int64_t low;
  int64_t high;
};
using Terms = c10::SmallVector<Term, 16>;

// The search gives up after this many steps. Only strides that no view of a tensor has need so many.
constexpr int64_t kSteps = 1 << 20;

// Returns whether the terms have multiples with the sum `target`. Terms with larger strides come first, because the
// terms after them can then compensate for only a few of their multiples.
bool reaches(c10::ArrayRef<Term> terms, int64_t target, int64_t& steps) {
  if (terms.empty()) {
    return target == 0;
  }
  if (++steps > kSteps) {
    return true; // unknown: assume that the tensors overlap
  }
  const auto& [stride, low, high] = terms.front();
  const auto rest = terms.slice(1);
  int64_t least = 0;
  int64_t most = 0;
  int64_t divisor = stride;
  for (const auto& term : rest) {
    least += term.stride * term.low;
    most += term.stride * term.high;
    divisor = std::gcd(divisor, term.stride);
  }
  if (target % divisor != 0) {
    return false;
  }
  const auto floor = [](int64_t value, int64_t by) { return value / by - (value % by < 0 ? 1 : 0); };
  const int64_t first = std::max(low, -floor(most - target, stride));
  const int64_t last = std::min(high, floor(target - least, stride));
  for (int64_t count = first; count <= last; ++count) {
    if (reaches(rest, target - count * stride, steps)) {
      return true;
    }
  }
  return false;
}

bool reaches(const Terms& terms, int64_t target) {
  int64_t steps = 0;
  return reaches(c10::ArrayRef<Term>(terms), target, steps);
}

bool is_larger(const Term& one, const Term& other) {
  return one.stride > other.stride;
}

// Adds the range by which the index of a dimension can change the distance of two elements: upwards for a dimension of
// the first tensor, downwards for one of the second.
void add(Terms& terms, int64_t stride, int64_t count, bool of_first) {
  if (count <= 1 || stride == 0) {
    return;
  }
  auto* known = std::find_if(terms.begin(), terms.end(), [&](const Term& term) { return term.stride == stride; });
  if (known == terms.end()) {
    terms.push_back({stride, 0, 0});
    known = terms.end() - 1;
  }
  (of_first ? known->high : known->low) += (of_first ? 1 : -1) * (count - 1);
}

std::string numbered(const Argument& argument, size_t index) {
  return argument.tensors.size() == 1 ? argument.name : c10::str(argument.name, "[", index, "]");
}

} // namespace

bool share_memory(const at::Tensor& one, const at::Tensor& other) {
  if (one.numel() == 0 || other.numel() == 0) {
    return false;
  }
  const auto first = span_of(one);
  const auto second = span_of(other);
  if (first.begin >= second.end || second.begin >= first.end) {
    return false;
  }
  if (one.is_contiguous() && other.is_contiguous()) {
    return true;
  }
  // Offsets of bytes are sums of strides: some byte of `one` must lie `distance` behind a byte of `other`.
  int64_t distance = second.begin - first.begin;
  int64_t unit = std::gcd(distance, std::gcd<int64_t>(one.element_size(), other.element_size()));
  Terms terms;
  for (const auto* tensor : {&one, &other}) {
    const auto bytes = static_cast<int64_t>(tensor->element_size());
    add(terms, 1, bytes / unit, tensor == &one);
    for (int64_t dim = 0; dim < tensor->dim(); ++dim) {
      add(terms, tensor->stride(dim) * bytes / unit, tensor->size(dim), tensor == &one);
    }
  }
  std::sort(terms.begin(), terms.end(), is_larger);
  return reaches(terms, distance / unit);
}

bool shares_with_itself(const at::Tensor& tensor) {
  if (tensor.numel() <= 1 || tensor.is_contiguous()) {
    return false;
  }
  Terms terms;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    const int64_t stride = tensor.stride(dim);
    const int64_t far = tensor.size(dim) - 1;
    if (far > 0 && stride == 0) {
      return true;
    }
    if (far > 0) {
      terms.push_back({stride, -far, far});
    }
  }
  std::sort(terms.begin(), terms.end(), is_larger);
  // Two elements in the same place differ in some dimension. Consider the first such dimension; the larger index comes
  // first.
  for (size_t first = 0; first < terms.size(); ++first) {
    Terms differ(terms.begin() + first, terms.end());
    differ[0].low = 1;
    if (reaches(differ, 0)) {
      return true;
    }
  }
  return false;
}

bool same_memory(const at::Tensor& one, const at::Tensor& other) {
  return one.const_data_ptr() == other.const_data_ptr() && one.scalar_type() == other.scalar_type() && one.numel() == other.numel() &&
      ((one.is_contiguous() && other.is_contiguous()) || (one.sizes() == other.sizes() && one.strides() == other.strides()));
}

bool is_part(const at::Tensor& part, const at::Tensor& whole, int number, int count) {
  return part.is_contiguous() && whole.is_contiguous() && part.scalar_type() == whole.scalar_type() &&
      part.numel() * count == whole.numel() &&
      static_cast<const char*>(part.const_data_ptr()) ==
      static_cast<const char*>(whole.const_data_ptr()) + part.nbytes() * static_cast<size_t>(number);
}

void check_disjoint(
    const char* op, const Argument& outputs, const Argument& inputs, c10::function_ref<bool(size_t output, size_t input)> in_place) {
  struct Place {
    Span span;
    size_t index;
    bool is_output;
  };
  c10::SmallVector<Place, 16> places;
  for (const auto* argument : {&outputs, &inputs}) {
    for (size_t i = 0; i < argument->tensors.size(); ++i) {
      if (argument->tensors[i].numel() > 0) {
        places.push_back({span_of(argument->tensors[i]), i, argument == &outputs});
      }
    }
  }
  std::sort(places.begin(), places.end(), [](const Place& one, const Place& next) { return one.span.begin < next.span.begin; });
  c10::SmallVector<const Place*, 16> open; // earlier places that may overlap with the next
  for (const auto& place : places) {
    open.erase(
        std::remove_if(open.begin(), open.end(), [&](const Place* before) { return before->span.end <= place.span.begin; }),
        open.end());
    for (const auto* before : open) {
      if (!before->is_output && !place.is_output) {
        continue;
      }
      const auto& output = place.is_output ? place : *before;
      const auto& other = place.is_output ? *before : place;
      const auto& second = (other.is_output ? outputs : inputs);
      if ((!other.is_output && in_place(output.index, other.index)) ||
          !share_memory(outputs.tensors[output.index], second.tensors[other.index])) {
        continue;
      }
      TORCH_CHECK_VALUE(
          !other.is_output, op, ": ", numbered(outputs, std::max(output.index, other.index)), ": shares memory with ",
          numbered(outputs, std::min(output.index, other.index)), "; allowed are tensors that share no memory with each other");
      TORCH_CHECK_VALUE(
          false, op, ": ", numbered(outputs, output.index), ": shares memory with ", numbered(inputs, other.index),
          "; allowed are tensors that share no memory with the input, or the same memory for an input and its own result");
    }
    open.push_back(&place);
  }
}

} // namespace fog
