#include "signature.hpp"

#include <algorithm>
#include <sstream>

#include <c10/core/ScalarType.h>

namespace fog {
namespace {

const char* name_of_reduce_op(uint8_t op) {
  static constexpr const char* names[] = {"SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
  return op < std::size(names) ? names[op] : nullptr;
}

// Python's names; c10 has only its own ("Float") to offer here.
std::string dtype_name(int8_t dtype) {
  switch (static_cast<c10::ScalarType>(dtype)) {
    case c10::ScalarType::Byte:
      return "uint8";
    case c10::ScalarType::Char:
      return "int8";
    case c10::ScalarType::Short:
      return "int16";
    case c10::ScalarType::Int:
      return "int32";
    case c10::ScalarType::Long:
      return "int64";
    case c10::ScalarType::UInt16:
      return "uint16";
    case c10::ScalarType::UInt32:
      return "uint32";
    case c10::ScalarType::UInt64:
      return "uint64";
    case c10::ScalarType::Half:
      return "float16";
    case c10::ScalarType::BFloat16:
      return "bfloat16";
    case c10::ScalarType::Float:
      return "float32";
    case c10::ScalarType::Double:
      return "float64";
    case c10::ScalarType::ComplexHalf:
      return "complex32";
    case c10::ScalarType::ComplexFloat:
      return "complex64";
    case c10::ScalarType::ComplexDouble:
      return "complex128";
    case c10::ScalarType::Bool:
      return "bool";
    default:
      return c10::toString(static_cast<c10::ScalarType>(dtype));
  }
}

} // namespace

const char* name_of(OpKind kind) {
  switch (kind) {
    case OpKind::kAllreduce:
      return "allreduce";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kReduce:
      return "reduce";
    case OpKind::kAllgather:
      return "allgather";
    case OpKind::kGather:
      return "gather";
    case OpKind::kScatter:
      return "scatter";
    case OpKind::kReduceScatter:
      return "reduce_scatter";
    case OpKind::kAlltoall:
      return "alltoall";
    case OpKind::kBarrier:
      return "barrier";
    case OpKind::kPointToPoint:
      return "send/recv";
    case OpKind::kNeighborAllreduce:
      return "neighbor_allreduce";
    case OpKind::kNeighborAllgather:
      return "neighbor_allgather";
    case OpKind::kAllgatherConcat:
      return "allgather_concat";
  }
  return "unknown op";
}

Signature Signature::of(OpKind kind, const at::Tensor& tensor) {
  Signature signature;
  signature.kind = kind;
  signature.dtype = static_cast<int8_t>(tensor.scalar_type());
  signature.dims = static_cast<uint8_t>(std::min<int64_t>(tensor.dim(), 255));
  signature.numel = tensor.numel();
  std::copy_n(tensor.sizes().begin(), std::min<int64_t>(tensor.dim(), kMaxDims), signature.shape.begin());
  return signature;
}

bool Signature::agrees_with(const Signature& other) const {
  if (kind != other.kind || dtype != other.dtype || reduce_op != other.reduce_op || root != other.root) {
    return false;
  }
  switch (kind) {
    case OpKind::kAlltoall:
      return true;
    case OpKind::kNeighborAllgather:
    case OpKind::kAllgatherConcat:
      return dims == other.dims && std::equal(shape.begin() + 1, shape.end(), other.shape.begin() + 1);
    case OpKind::kNeighborAllreduce:
      return dims == other.dims && numel == other.numel && shape == other.shape;
    default:
      return numel == other.numel;
  }
}

std::string Signature::describe() const {
  std::ostringstream text;
  text << name_of(kind) << '(';
  if (const char* reduction = name_of_reduce_op(reduce_op)) {
    text << reduction << ", ";
  }
  if (dtype >= 0) {
    text << dtype_name(dtype) << '[';
    for (int dim = 0; dim < std::min<int>(dims, kMaxDims); ++dim) {
      text << (dim > 0 ? ", " : "") << shape[dim];
    }
    text << (dims > kMaxDims ? ", ...]" : "]");
  }
  if (root >= 0) {
    text << ", root " << root;
  }
  text << ')';
  return text.str();
}

} // namespace fog
