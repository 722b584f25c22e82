#include "core/signature.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <sstream>

#include "core/failure.hpp"
#include "core/names.hpp"

namespace fog {

const char* name_of(OpKind kind) {
  static constexpr const char* names[] = {
      "allreduce",
      "broadcast",
      "reduce",
      "allgather",
      "gather",
      "scatter",
      "reduce_scatter",
      "alltoall",
      "barrier",
      "send/recv",
      "neighbor_allreduce",
      "neighbor_allgather",
      "allgather_concat",
      "allreduce_sparse",
      "monitored_barrier",
      "hierarchical_neighbor_allreduce",
      "local_allreduce",
      "agree"};
  static_assert(std::size(names) == static_cast<size_t>(OpKind::kAgree));
  const size_t place = static_cast<size_t>(kind) - 1; // a damaged message may have any number
  return place < std::size(names) ? names[place] : "unknown op";
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

void Signature::set_codec(const std::string& text) {
  std::string shown = text;
  if (shown.size() >= kCodecBytes) {
    std::ostringstream hash;
    hash << "... #" << std::hex << mark(hash_more(kEmptyHash, text.data(), text.size()));
    shown = text.substr(0, kCodecBytes - 1 - hash.str().size()) + hash.str();
  }
  codec = {};
  std::copy(shown.begin(), shown.end(), codec.begin());
}

bool Signature::agrees_with(const Signature& other) const {
  if (kind != other.kind || dtype != other.dtype || reduce_op != other.reduce_op || root != other.root || tensors != other.tensors ||
      machines != other.machines || layout != other.layout || codec != other.codec) {
    return false;
  }
  switch (kind) {
    case OpKind::kAlltoall:
      return true;
    case OpKind::kNeighborAllgather:
    case OpKind::kAllgatherConcat:
    case OpKind::kAllreduceSparse:
      return dims == other.dims && std::equal(shape.begin() + 1, shape.end(), other.shape.begin() + 1);
    case OpKind::kPointToPoint: // a flat buffer may be sent to a matrix
      return numel == other.numel;
    default:
      return dims == other.dims && numel == other.numel && shape == other.shape;
  }
}

std::string Signature::describe() const {
  if (kind == OpKind::kAgree) {
    return "a comparison of arguments"; // whose contents are marks, which mean nothing to a user
  }
  std::ostringstream text;
  text << name_of(kind) << '(';
  if (const char* reduction = reduction_name(static_cast<c10d::ReduceOp::RedOpType>(reduce_op))) {
    text << reduction << ", ";
  }
  if (dtype >= 0) {
    text << dtype_name(static_cast<c10::ScalarType>(dtype)) << '[';
    for (int dim = 0; dim < std::min<int>(dims, kMaxDims); ++dim) {
      text << (dim > 0 ? ", " : "") << shape[dim];
    }
    text << (dims > kMaxDims ? ", ...]" : "]");
  }
  if (root >= 0) {
    text << ", root " << root;
  }
  if (tensors > 0) {
    text << ", list of " << tensors << " tensors";
  }
  if (machines > 0) {
    text << ", " << machines << (machines == 1 ? " machine" : " machines");
  }
  if (codec[0] != 0) {
    text << ", compression " << text_from_peer(codec.data(), strnlen(codec.data(), codec.size()));
  }
  if (layout != 0) { // shows a difference that no other field shows
    text << ", layout " << std::hex << layout;
  }
  text << ')';
  return text.str();
}

uint64_t hash_more(uint64_t hash, const void* bytes, size_t count) {
  for (const auto* byte = static_cast<const uint8_t*>(bytes); count > 0; ++byte, --count) {
    hash = (hash ^ *byte) * 1099511628211ULL;
  }
  return hash;
}

uint32_t mark(uint64_t hash) {
  return std::max(static_cast<uint32_t>(hash ^ hash >> 32), uint32_t(1));
}

} // namespace fog
