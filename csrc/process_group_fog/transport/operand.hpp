// What a reduction reads: memory of this process, or of another one on this host.
#pragma once

#include <cstddef>
#include <functional>
#include <stdexcept>
#include <vector>

namespace fog {

struct Operand {
  const void* data = nullptr;
  int pid = 0; // of the process whose memory it is; 0: this one
  size_t window = 0; // if not 0, byte i of the operand is byte i % window of the memory
};

// The memory of process `pid` cannot be read: mostly because it has ended.
struct UnreadableMemory : std::runtime_error {
  UnreadableMemory(int process, int error);
  const int pid;
  const bool process_ended;
};

// Copies a part of a result of `total` bytes to its place: past the cache if the whole would not stay there anyway.
void copy_result(void* to, const void* from, size_t bytes, size_t total);
inline void copy_result(void* to, const void* from, size_t bytes) {
  copy_result(to, from, bytes, bytes);
}

// Copies `bytes` of the operand, which has `total`, from `offset` on, to `to`. Throws UnreadableMemory.
void read_operand(const Operand& operand, size_t offset, void* to, size_t bytes, size_t total);

// The other direction, into a window of this process: `bytes` of `from`, which become those of the operand from `offset` on.
void fill_window(char* memory, size_t window, size_t offset, const void* from, size_t bytes);

// Goes through elements `from` to `to`, of `item` bytes each, of several operands, in blocks that stay in the cache, so that
// each operand's memory is read once. For each block it calls use(inputs, begin, count): where the block of each operand
// is, copied here if it is another process's, and which elements these are. Throws UnreadableMemory.
void for_blocks(
    const std::vector<Operand>& operands,
    size_t item,
    size_t from,
    size_t to,
    const std::function<void(const std::vector<const void*>& inputs, size_t begin, size_t count)>& use);

} // namespace fog
