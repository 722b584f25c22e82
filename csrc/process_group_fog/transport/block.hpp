// Parts of messages that are read in place: in a neighbor's arena, in chunks of shared memory, or in the memory that
// received a message.
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

// An input of a reduction: plain memory, or consecutive blocks.
struct Input {
  const void* data = nullptr; // all of it, or null if there are blocks
  std::vector<Block> blocks;
};

// Goes through elements `from` to `to`, of `item` bytes each, of several inputs. For each stretch that is contiguous in
// all inputs it calls use(where, begin, count), with the address of the stretch in each input, its first element and
// its number of elements.
void for_pieces(
    const std::vector<Input>& inputs,
    size_t item,
    size_t from,
    size_t to,
    c10::function_ref<void(const std::vector<const void*>& where, size_t begin, size_t count)> use);

// Copies a part of a result of `total` bytes to its place: past the cache if the whole result is too large to stay
// there.
void copy_result(void* to, const void* from, size_t bytes, size_t total);
inline void copy_result(void* to, const void* from, size_t bytes) {
  copy_result(to, from, bytes, bytes);
}

} // namespace fog
