// Which way an operation goes: one table, the same on every rank, of what all know alike: bytes, ranks and hosts.
//
// The reasons, and what was measured, are in docs/architecture.md.
#pragma once

#include <cstddef>

#include "core/machines.hpp"

namespace fog::cutovers {

// --- operations without arithmetic ---
// Up to so many bytes a tree costs less than what it sends more than once.
constexpr size_t kTree = size_t(64) << 10;
// A piece of a slice smaller than this costs as much as an empty message.
constexpr size_t kLeastPiece = size_t(8) << 10;
// Up to so many bytes of one rank messages cost more than what they carry, however many ranks' are sent on.
constexpr size_t kBlock = 256;
// So many ranks of one host send each other single messages sooner than some messages one after the other.
constexpr int kDirectOnHost = 8;

// Of broadcast: whether the tensor goes between hosts in slices.
inline bool in_slices(size_t bytes, const Machines& hosts) {
  const auto pieces = static_cast<size_t>(hosts.least()) * static_cast<size_t>(hosts.count() - 1);
  return pieces > 0 && bytes > kTree && bytes / pieces >= kLeastPiece;
}

// Of allgather, gather and scatter: whether ranks send on what is others', `bytes` of each rank.
inline bool sent_on(size_t bytes, int ranks, const Machines& hosts) {
  const bool few = ranks <= (hosts.count() == 1 ? kDirectOnHost : 2);
  return !few && bytes > 0 && (bytes * static_cast<size_t>(ranks) <= kTree || bytes <= kBlock);
}

} // namespace fog::cutovers
