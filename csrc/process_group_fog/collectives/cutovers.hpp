// The choice of the algorithm for each operation, in one table. It depends only on values that all ranks know alike:
// bytes, ranks and hosts.
//
// docs/architecture.md has the reasons and the measurements.
#pragma once

#include <algorithm>
#include <cstddef>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "core/machines.hpp"
#include "transport/transport.hpp"

namespace fog::cutovers {

// --- sums ---
// Up to this size, tensors go uncut between hosts: they come with their header, and are copied at once.
constexpr size_t kWhole = Transport::kInlineBytes;
// The same limit for reduce: cutting the tensor would take one more hop to the root.
constexpr size_t kWholeToRoot = size_t(64) << 10;
// The largest numbers of ranks on one host, of ranks on several hosts, and of hosts that all send to each other.
constexpr int kFewOnHost = 8;
constexpr int kFewApart = 4;
constexpr int kFewHosts = 8;
// The largest number of hosts in a ring, which has as many message numbers as an operation, and the smallest slice that
// goes around a ring of many hosts: its hops take longer than the fewer rounds of larger messages otherwise.
constexpr int kMostInRing = 30;
constexpr size_t kLeastInRing = Transport::kInlineBytes;
// The smallest part of a tensor for a rank: within its host, and between hosts.
constexpr size_t kLeastSlice = size_t(4) << 10;
constexpr size_t kLeastLane = size_t(16) << 10;
// Parts of a tensor that are in flight at the same time.
constexpr size_t kLeastPart = size_t(1) << 20;
constexpr size_t kMostParts = 8;

struct Path {
  bool direct; // all ranks send to all, or to the root, for one sum; otherwise by hosts:
  bool whole; // uncut between hosts
  bool trees; // uncut within a host
  bool few_hosts; // whole tensors go from each host to each other host
  bool ring; // slices go around a ring of hosts
  int lanes; // ranks per host that send to other hosts; on one host: ranks that sum

  // Returns whether each element is summed once, so that a 16-bit type is rounded once.
  bool sums_once(const Machines& hosts) const {
    return direct || (hosts.count() == 1 && !trees);
  }
};

inline bool are_few(const Layout& layout) {
  return static_cast<int>(layout.ranks.size()) <= (layout.hosts.count() == 1 ? kFewOnHost : kFewApart);
}

inline bool in_ring(size_t bytes, const Machines& hosts) {
  return hosts.count() <= kFewHosts || (hosts.count() <= kMostInRing && bytes / static_cast<size_t>(hosts.count()) >= kLeastInRing);
}

inline Path path_of(size_t bytes, size_t most_whole, const Layout& layout) {
  const auto& hosts = layout.hosts;
  const auto most = static_cast<size_t>(hosts.most());
  Path path{};
  path.whole = bytes <= most_whole;
  path.direct = path.whole && are_few(layout);
  path.trees = path.whole || (most > kFewOnHost && bytes / most < kLeastSlice);
  path.few_hosts = hosts.count() <= kFewHosts;
  path.ring = !path.whole && in_ring(bytes, hosts);
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

// Returns into how many parts an allreduce is divided, so that hosts reduce some parts while the links carry others.
inline int parts(size_t bytes, const Layout& layout, const Path& path) {
  return layout.hosts.count() == 1 || path.trees ? 1 : static_cast<int>(std::clamp(bytes / kLeastPart, size_t(1), kMostParts));
}

inline Path of_reduce(size_t bytes, const Layout& layout) {
  auto path = path_of(bytes, kWholeToRoot, layout);
  path.direct = path.direct || layout.ranks.size() == 2; // the second rank does not need the sum
  return path;
}

// For reduce_scatter: returns whether each input goes directly to its rank.
inline bool scatters_directly(size_t bytes, const Layout& layout) {
  const auto& hosts = layout.hosts;
  if (hosts.count() == 1) {
    return are_few(layout) || bytes / layout.ranks.size() >= kLeastSlice;
  }
  return are_few(layout) && bytes <= kWholeToRoot;
}

// Returns the dtype of partial sums. Sums of 16-bit types are rounded to the type, because links are limited by bytes.
// Exceptions are small tensors, whose bytes cost no time, and averages of float16, whose sums might overflow it.
inline c10::ScalarType partial_dtype(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op, size_t bytes, bool sums_once) {
  const bool is_half = dtype == c10::ScalarType::Half;
  if (sums_once || !(is_half || dtype == c10::ScalarType::BFloat16)) {
    return dtype;
  }
  return bytes <= kWhole || (is_half && op == c10d::ReduceOp::AVG) ? c10::ScalarType::Float : dtype;
}

// --- operations without arithmetic ---
// Up to this size, a tree is cheaper although it sends data more than once.
constexpr size_t kTree = size_t(64) << 10;
// A smaller piece of a slice costs as much as an empty message.
constexpr size_t kLeastPiece = size_t(8) << 10;
// Up to this number of bytes per rank, messages cost more than their data, no matter how many ranks' data they forward.
constexpr size_t kBlock = 256;

// For broadcast: returns whether the tensor goes between hosts in slices.
inline bool in_slices(size_t bytes, const Machines& hosts) {
  const auto pieces = static_cast<size_t>(hosts.least()) * static_cast<size_t>(hosts.count() - 1);
  return pieces > 0 && bytes > kTree && bytes / pieces >= kLeastPiece;
}

// For allgather, gather and scatter: returns whether ranks forward the data of other ranks, with `bytes` of each rank.
inline bool sent_on(size_t bytes, int ranks, const Machines& hosts) {
  const bool few = ranks <= (hosts.count() == 1 ? kFewOnHost : 2);
  return !few && bytes > 0 && (bytes * static_cast<size_t>(ranks) <= kTree || bytes <= kBlock);
}

// For allgather: returns whether inputs of that size go from host to host around a ring.
inline bool gathers_in_ring(size_t bytes) {
  return bytes >= kLeastInRing;
}

} // namespace fog::cutovers
