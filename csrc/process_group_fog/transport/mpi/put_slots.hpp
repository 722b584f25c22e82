// What sender and receiver of notified puts have in common: where slots and versions are, and what the words say.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/one_sided.hpp"

namespace fog::mpi {

// A slot holds a chunk.
constexpr size_t kChunkBytes = OneSided::kMostBytes;

// A peer lends so many at most.
constexpr size_t kMostSlots = 32;

// A version, and a credit, are the number of a transfer and how many of its chunks are meant, in a word.
constexpr unsigned kCountBits = 20;
constexpr uint64_t kAll = (uint64_t(1) << kCountBits) - 1; // those there are, or will ever be
constexpr uint64_t word_of(uint64_t transfer, uint64_t chunks) {
  return transfer << kCountBits | chunks;
}

constexpr size_t chunks_of(size_t bytes) {
  return (bytes + kChunkBytes - 1) / kChunkBytes;
}

// Slots lie behind their versions, each of which has a cache line.
constexpr size_t kVersionStride = 64;
constexpr size_t versions_bytes(size_t slots) {
  return (slots * kVersionStride + 4095) / 4096 * 4096;
}
constexpr size_t version_at(size_t slot) {
  return slot * kVersionStride;
}
constexpr size_t slot_at(size_t slots, size_t slot) {
  return versions_bytes(slots) + slot * kChunkBytes;
}

} // namespace fog::mpi
