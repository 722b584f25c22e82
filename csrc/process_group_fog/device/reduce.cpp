#include "device/reduce.hpp"

#include <optional>
#include <vector>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include "core/names.hpp"

namespace fog::device {
namespace {

using RedOp = c10d::ReduceOp::RedOpType;

// The signed type of the same size, whose sums, products and bit operations have the same bits; torch has few
// operations for these unsigned types.
std::optional<c10::ScalarType> signed_type(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::UInt16:
      return at::kShort;
    case c10::ScalarType::UInt32:
      return at::kInt;
    case c10::ScalarType::UInt64:
      return at::kLong;
    default:
      return std::nullopt;
  }
}

void add(RedOp op, at::Tensor& result, const at::Tensor& row) {
  const bool logical = result.scalar_type() == at::kBool;
  switch (op) {
    case RedOp::SUM:
    case RedOp::AVG:
    case RedOp::PREMUL_SUM:
      logical ? result.logical_or_(row) : result.add_(row);
      return;
    case RedOp::PRODUCT:
      logical ? result.logical_and_(row) : result.mul_(row);
      return;
    case RedOp::MIN:
      logical ? result.logical_and_(row) : at::minimum_out(result, result, row);
      return;
    case RedOp::MAX:
      logical ? result.logical_or_(row) : at::maximum_out(result, result, row);
      return;
    case RedOp::BAND:
      result.bitwise_and_(row);
      return;
    case RedOp::BOR:
      result.bitwise_or_(row);
      return;
    case RedOp::BXOR:
      result.bitwise_xor_(row);
      return;
    default:
      TORCH_INTERNAL_ASSERT(false, "fog: reduction ", static_cast<int>(op), " passed its check but has no device form");
  }
}

} // namespace

void check_reduction_on_device(const char* op, RedOp reduction, const at::Tensor& tensor) {
  const bool needs_sign = reduction == RedOp::MIN || reduction == RedOp::MAX || reduction == RedOp::AVG;
  TORCH_CHECK_VALUE(
      !(needs_sign && signed_type(tensor.scalar_type())), op, ": op: got ", reduction_name(reduction), " for dtype ",
      dtype_name(tensor.scalar_type()), " on ", tensor.device(), "; there uint8 is the only unsigned dtype that it allows");
}

void reduce(RedOp op, const at::Tensor& out, c10::ArrayRef<at::Tensor> rows) {
  const auto dtype = out.scalar_type();
  const auto as_signed = signed_type(dtype);
  const auto wide = c10::isReducedFloatingType(dtype) ? at::kFloat : as_signed.value_or(dtype);
  const auto read = [&](const at::Tensor& row) { return as_signed ? row.view(*as_signed) : row; };
  auto result = read(rows[0]).to(wide, false, true);
  for (const auto& row : rows.slice(1)) {
    add(op, result, wide == dtype || as_signed ? read(row) : row.to(wide));
  }
  if (op == RedOp::AVG) {
    // Divide by a tensor: a division by a number would multiply by its reciprocal.
    const auto count = at::full({}, static_cast<double>(rows.size()), result.options());
    c10::isIntegralType(wide, false) ? result.div_(count, "trunc") : result.div_(count);
  }
  read(out).copy_(result);
}

} // namespace fog::device
