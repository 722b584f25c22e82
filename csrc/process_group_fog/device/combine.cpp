#include "device/combine.hpp"

#include <limits>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

namespace fog::device {
namespace {

// The largest numbers of columns, and of elements from one row to the next, that fit into a BLAS's int.
constexpr int64_t kMostOfBlas = std::numeric_limits<int>::max();

// A view of complex numbers as pairs of real numbers in the last dimension.
at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor).flatten(-2) : tensor;
}

at::Tensor vector_of(c10::ArrayRef<double> values, const at::TensorOptions& options) {
  const auto vector = at::full({static_cast<int64_t>(values.size())}, values[0], options);
  for (size_t i = 1; i < values.size(); ++i) {
    if (values[i] != values[0]) {
      // Do not copy from host memory: a replayed graph would read the memory again.
      vector[static_cast<int64_t>(i)].fill_(values[i]);
    }
  }
  return vector;
}

// A matrix-vector product reads every row once and writes the result once.
void multiply(const at::Tensor& out, const at::Tensor& own, double own_weight, const at::Tensor& rows, c10::ArrayRef<double> weights) {
  auto result = out;
  at::addmv_out(result, own, rows.t(), vector_of(weights, out.options()), own_weight, 1);
}

// Adds row by row into a sum of a wider dtype, or of the same dtype if the rows are too long for a BLAS. ATen's
// products only take weights of the rows' own dtype, in which 1/3 would be off by a thousandth for bfloat16, and its
// sums take no weights. Each row is read once, but the sum is read and written for each row.
at::Tensor add_up(
    const at::Tensor& own, double own_weight, const at::Tensor& rows, c10::ArrayRef<double> weights, c10::ScalarType type) {
  auto sum = at::zeros(own.sizes(), own.options().dtype(type));
  if (own_weight != 0) {
    sum.add_(own, own_weight);
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    sum.add_(rows[static_cast<int64_t>(i)], weights[i]);
  }
  return sum;
}

void combine_real(
    const at::Tensor& out, const at::Tensor& own, double own_weight, const at::Tensor& rows, c10::ArrayRef<double> weights, bool mean) {
  // Divide by a tensor: a division by a number would multiply by its reciprocal.
  const auto divide = [&](at::Tensor sum) {
    if (mean) {
      sum.div_(at::full({}, static_cast<double>(1 + weights.size()), sum.options()));
    }
  };
  const auto dtype = out.scalar_type();
  const bool is_half = c10::isReducedFloatingType(dtype);
  if (!is_half && !weights.empty() && rows.size(1) <= kMostOfBlas && rows.stride(0) <= kMostOfBlas) {
    multiply(out, own, own_weight, rows, weights);
    divide(out);
    return;
  }
  const auto sum = add_up(own, own_weight, rows, weights, is_half ? at::kFloat : dtype);
  divide(sum);
  out.copy_(sum);
}

} // namespace

void combine(
    const at::Tensor& out, const at::Tensor& own, double own_weight, const at::Tensor& rows, c10::ArrayRef<double> weights, bool mean) {
  TORCH_INTERNAL_ASSERT(
      rows.size(0) == static_cast<int64_t>(weights.size()), "fog: ", rows.size(0), " rows and ", weights.size(), " weights in one sum");
  if (out.numel() > 0) {
    combine_real(as_real(out), as_real(own), own_weight, as_real(rows), weights, mean);
  }
}

at::Tensor scaled(const at::Tensor& vector, double weight) {
  if (weight == 0) {
    return at::zeros_like(vector);
  }
  const auto product = as_real(vector).mul(weight);
  return vector.is_complex() ? at::view_as_complex(product.view({-1, 2})) : product;
}

} // namespace fog::device
