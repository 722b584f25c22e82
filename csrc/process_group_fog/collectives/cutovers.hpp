// Which way an operation goes: one table, the same on every rank, of what all know alike: bytes, ranks and hosts.
//
// The reasons, and what was measured, are in docs/architecture.md.
#pragma once

#include <algorithm>
#include <cstddef>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "core/machines.hpp"
#include "transport/transport.hpp"

namespace fog::cutovers {

// --- sums ---
// Tensors go whole from host to host up to here: they come with their header, and are copied at once.
constexpr size_t kWhole = Transport::kInlineBytes;
// To the root, up to here: cut, they would take a hop more.
constexpr size_t kWholeToRoot = size_t(64) << 10;
// As many ranks of one host send to each other; of several hosts; hosts.
constexpr int kFewOnHost = 8;
constexpr int kFewApart = 4;
constexpr int kFewHosts = 8;
// The least that a rank takes of a tensor that is cut, in its host and between hosts.
constexpr size_t kLeastSlice = size_t(2) << 10;
constexpr size_t kLeastLane = size_t(16) << 10;
// Parts of a tensor that go on side by side.
constexpr size_t kLeastPart = size_t(2) << 20;
constexpr size_t kMostParts = 8;

struct Path {
  bool direct; // all ranks to all, or to the root, in one sum; else by hosts:
  bool whole; // uncut between hosts
  bool trees; // uncut within a host
  bool few_hosts; // each sends to each other
  int lanes; // ranks of a host that send to other hosts; on one host, that sum

  // Whether each element is summed once, so that a type of 16 bits is rounded once.
  bool sums_once(const Machines& hosts) const {
    return direct || (hosts.count() == 1 && !trees);
  }
};

inline bool are_few(const Layout& layout) {
  return static_cast<int>(layout.ranks.size()) <= (layout.hosts.count() == 1 ? kFewOnHost : kFewApart);
}

inline Path path_of(size_t bytes, size_t most_whole, const Layout& layout) {
  const auto& hosts = layout.hosts;
  const auto most = static_cast<size_t>(hosts.most());
  Path path{};
  path.whole = bytes <= most_whole;
  path.direct = path.whole && are_few(layout);
  path.trees = path.whole || (most > kFewOnHost && bytes / most < kLeastSlice);
  path.few_hosts = hosts.count() <= kFewHosts;
  if (path.trees) {
    path.lanes = 1;
  } else if (hosts.count() == 1) {
    path.lanes = hosts.least();
  } else {
    path.lanes = static_cast<int>(std::clamp(bytes / kLeastLane, size_t(1), static_cast<size_t>(hosts.least())));
  }
  return path;
}

inline Path of_allreduce(size_t bytes, const Layout& layout) {
  return path_of(bytes, kWhole, layout);
}

// In how many parts an allreduce goes, so that a host's memory works on some while the links carry others.
inline int parts(size_t bytes, const Layout& layout, const Path& path) {
  return layout.hosts.count() == 1 || path.trees ? 1 : static_cast<int>(std::clamp(bytes / kLeastPart, size_t(1), kMostParts));
}

inline Path of_reduce(size_t bytes, const Layout& layout) {
  auto path = path_of(bytes, kWholeToRoot, layout);
  path.direct = path.direct || layout.ranks.size() == 2; // the other one needs nothing of the sum
  return path;
}

// Of reduce_scatter: whether each input goes straight to its rank.
inline bool scatters_directly(size_t bytes, const Layout& layout) {
  const auto& hosts = layout.hosts;
  if (hosts.count() == 1) {
    return are_few(layout) || bytes / layout.ranks.size() >= kLeastSlice;
  }
  return hosts.most() == 1 ? hosts.count() <= kFewHosts : are_few(layout) && bytes <= kWholeToRoot;
}

// The dtype of partial sums. Those of 16 bits are rounded, as bytes are what a link costs, but for so few that they cost no time, and for
// means of float16: its sums might be too large for it.
inline c10::ScalarType partial_dtype(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op, size_t bytes, bool sums_once) {
  const bool is_half = dtype == c10::ScalarType::Half;
  if (sums_once || !(is_half || dtype == c10::ScalarType::BFloat16)) {
    return dtype;
  }
  return bytes <= kWhole || (is_half && op == c10d::ReduceOp::AVG) ? c10::ScalarType::Float : dtype;
}

// --- operations without arithmetic ---
// Up to so many bytes a tree costs less than what it sends more than once.
constexpr size_t kTree = size_t(64) << 10;
// A piece of a slice smaller than this costs as much as an empty message.
constexpr size_t kLeastPiece = size_t(8) << 10;
// Up to so many bytes of one rank messages cost more than what they carry, however many ranks' are sent on.
constexpr size_t kBlock = 256;

// Of broadcast: whether the tensor goes between hosts in slices.
inline bool in_slices(size_t bytes, const Machines& hosts) {
  const auto pieces = static_cast<size_t>(hosts.least()) * static_cast<size_t>(hosts.count() - 1);
  return pieces > 0 && bytes > kTree && bytes / pieces >= kLeastPiece;
}

// Of allgather, gather and scatter: whether ranks send on what is others', `bytes` of each rank.
inline bool sent_on(size_t bytes, int ranks, const Machines& hosts) {
  const bool few = ranks <= (hosts.count() == 1 ? kFewOnHost : 2);
  return !few && bytes > 0 && (bytes * static_cast<size_t>(ranks) <= kTree || bytes <= kBlock);
}

} // namespace fog::cutovers
