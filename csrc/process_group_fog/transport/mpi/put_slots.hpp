// The layout of slots and versions that sender and receiver of notified puts share, and the format of their words.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/one_sided.hpp"

namespace fog::mpi {

// A slot holds a chunk.
constexpr size_t kChunkBytes = OneSided::kMostBytes;

// A peer lends at most this many.
constexpr size_t kMostSlots = 32;

// A version is one word: the number of a transfer and a number of its chunks.
constexpr unsigned kCountBits = 20;
constexpr uint32_t kAll = (uint32_t(1) << kCountBits) - 1; // stands for all chunks, including any that follow
constexpr uint64_t word_of(uint64_t transfer, uint64_t chunks) {
  return transfer << kCountBits | chunks;
}

constexpr size_t chunks_of(size_t bytes) {
  return (bytes + kChunkBytes - 1) / kChunkBytes;
}

// Slots come after their versions. Each version has its own cache line.
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
