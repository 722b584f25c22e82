#include "cuda/combine.hpp"

#include <cmath>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include "cuda/kernels.hpp"
#include "cuda/stream.hpp"

namespace fog::cuda {
namespace {

// "torch" or "kernel": the form of weighted sums on devices, in place of the one that fog chooses. For comparing the two.
constexpr const char* kFormVariable = "FOG_COMBINE";

void warn_once(const at::Device& device, const std::string& reason) {
  static std::mutex mutex;
  static auto* warned = new std::set<at::DeviceType>;
  const std::lock_guard<std::mutex> lock(mutex);
  if (warned->insert(device.type()).second) {
    TORCH_WARN(
        "fog: weighted sums on ", c10::DeviceTypeName(device.type(), true),
        " run on torch's own operations, which take several "
        "passes: ",
        reason);
  }
}

c10::ScalarType accumulation_type(c10::ScalarType dtype) {
  return c10::isReducedFloatingType(dtype) ? at::kFloat : at::kDouble;
}

// Whether weight * value needs no rounding (but where it falls below the smallest normal number).
bool is_power_of_two(double weight) {
  int exponent = 0;
  return std::abs(std::frexp(weight, &exponent)) == 0.5;
}

void combine_by_torch(const at::Tensor& out, c10::ArrayRef<at::Tensor> rows, c10::ArrayRef<double> weights, bool mean) {
  if (rows.empty()) {
    out.zero_();
    return;
  }
  const auto type = accumulation_type(out.scalar_type());
  auto sum = rows[0].to(type, false, true);
  if (!mean && weights[0] != 1.0) {
    sum.mul_(weights[0]);
  }
  at::Tensor term;
  for (size_t k = 1; k < rows.size(); ++k) {
    // add_() with a factor may or may not round the product, as the device likes: only where that is all the same.
    if (mean || is_power_of_two(weights[k])) {
      sum.add_(rows[k], mean ? 1.0 : weights[k]);
    } else {
      term = term.defined() ? term.copy_(rows[k]) : rows[k].to(type, false, true);
      sum.add_(term.mul_(weights[k]));
    }
  }
  if (mean) {
    // By a tensor: a division by a number would be a product with its reciprocal.
    sum.div_(at::full({}, static_cast<double>(rows.size()), sum.options()));
  }
  out.copy_(sum);
}

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor).view({-1}) : tensor.view({-1});
}

} // namespace

CombineForm combine_form(const at::Device& device) {
  const char* text = std::getenv(kFormVariable);
  const std::string chosen = text == nullptr ? "" : text;
  TORCH_CHECK_VALUE(
      chosen.empty() || chosen == "torch" || chosen == "kernel", kFormVariable, ": got '", chosen, "'; allowed are torch and kernel");
  if (chosen == "torch" || (device.is_cpu() && chosen.empty())) {
    return CombineForm::kTorch;
  }
  try {
    prepare_kernels(device);
    return CombineForm::kKernel;
  } catch (const c10::Error& error) {
    if (!chosen.empty()) {
      throw;
    }
    warn_once(device, error.what_without_backtrace());
    return CombineForm::kTorch;
  }
}

void combine(CombineForm form, const at::Tensor& out, c10::ArrayRef<at::Tensor> rows, c10::ArrayRef<double> weights, bool mean) {
  if (out.numel() == 0) {
    return;
  }
  const auto stream = current_stream(out.device());
  if (form == CombineForm::kKernel && stream && rows.size() <= static_cast<size_t>(kMostRows)) {
    std::vector<const void*> data;
    data.reserve(rows.size());
    for (const auto& row : rows) {
      data.push_back(row.const_data_ptr());
    }
    launch_combine(
        out.device(), out.scalar_type(), out.mutable_data_ptr(), data, mean ? c10::ArrayRef<double>() : weights, mean,
        static_cast<size_t>(out.numel()), stream->native_handle());
    return;
  }
  std::vector<at::Tensor> parts;
  parts.reserve(rows.size());
  for (const auto& row : rows) {
    parts.push_back(as_real(row));
  }
  combine_by_torch(as_real(out), parts, weights, mean);
}

} // namespace fog::cuda
