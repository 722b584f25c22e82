#include "transport/block.hpp"

#include <algorithm>

#include <c10/util/SmallVector.h>

#include "core/copy.hpp"

namespace fog {
namespace {

// Larger results leave the cache before they are likely to be read again.
constexpr size_t kCachedBytes = size_t(2) << 20;

} // namespace

void copy_result(void* to, const void* from, size_t bytes, size_t total) {
  (total > kCachedBytes ? copy_far : copy_near)(to, from, bytes);
}

void for_pieces(
    const std::vector<Input>& inputs,
    size_t item,
    size_t from,
    size_t to,
    c10::function_ref<void(const std::vector<const void*>& where, size_t begin, size_t count)> use) {
  std::vector<const void*> where(inputs.size());
  c10::SmallVector<size_t, 8> block(inputs.size(), 0); // the current block of each input
  for (size_t begin = from; begin < to;) {
    const size_t offset = begin * item;
    size_t end = to * item;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto& input = inputs[i];
      if (input.data != nullptr) {
        where[i] = static_cast<const char*>(input.data) + offset;
        continue;
      }
      while (input.blocks[block[i]].end <= offset) { // blocks end between elements
        ++block[i];
      }
      const auto& piece = input.blocks[block[i]];
      where[i] = piece.data + (offset - piece.begin);
      end = std::min(end, piece.end);
    }
    const size_t count = (end - offset) / item;
    use(where, begin, count);
    begin += count;
  }
}

} // namespace fog
