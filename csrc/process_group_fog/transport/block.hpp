// What is read of a message where it lies: a neighbor's arena, chunks of shared memory, memory that a message came into.
#pragma once

#include <cstddef>
#include <vector>

#include <c10/util/FunctionRef.h>

namespace fog {

// Bytes `begin` to `end` of a message are readable at `data`.
struct Block {
  size_t begin = 0;
  size_t end = 0;
  const char* data = nullptr;
};

// One input of a reduction: plain memory, or blocks one after the other.
struct Input {
  const void* data = nullptr; // all of it; or
  std::vector<Block> blocks;
};

// Goes through elements `from` to `to`, of `item` bytes each, of several inputs. For each stretch that lies in one piece in all of them
// it calls use(where, begin, count): where the stretch begins in each input, and which elements it has.
void for_pieces(
    const std::vector<Input>& inputs,
    size_t item,
    size_t from,
    size_t to,
    c10::function_ref<void(const std::vector<const void*>& where, size_t begin, size_t count)> use);

// Copies a part of a result of `total` bytes to its place: past the cache if the whole would not stay there anyway.
void copy_result(void* to, const void* from, size_t bytes, size_t total);
inline void copy_result(void* to, const void* from, size_t bytes) {
  copy_result(to, from, bytes, bytes);
}

} // namespace fog
