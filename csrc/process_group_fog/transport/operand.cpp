#include "transport/operand.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "core/copy.hpp"
#include "transport/shared_memory/process_memory.hpp"

namespace fog {
namespace {

// All blocks of one step together stay below a usual second-level cache; each is large enough for the system call that
// fetches it to be cheap beside the copy.
constexpr size_t kStepBytes = size_t(512) << 10;
constexpr size_t kLeastBlock = size_t(16) << 10;
constexpr size_t kLargestBlock = size_t(128) << 10;
// Larger results are not expected to be read again before they have left the cache.
constexpr size_t kCachedBytes = size_t(2) << 20;

} // namespace

UnreadableMemory::UnreadableMemory(int process, int error)
    : std::runtime_error(std::strerror(error)), pid(process), process_ended(error == ESRCH) {}

void copy_result(void* to, const void* from, size_t bytes, size_t total) {
  (total > kCachedBytes ? copy_far : copy_near)(to, from, bytes);
}

void read_operand(const Operand& operand, size_t offset, void* to, size_t bytes, size_t total) {
  const auto* memory = static_cast<const char*>(operand.data);
  if (operand.window != 0) {
    const size_t position = offset % operand.window;
    const size_t first = std::min(bytes, operand.window - position);
    copy_result(to, memory + position, first, total);
    copy_result(static_cast<char*>(to) + first, memory, bytes - first, total);
  } else if (operand.pid == 0) {
    copy_result(to, memory + offset, bytes, total);
  } else if (const int error = shared_memory::read_process_memory(operand.pid, memory + offset, to, bytes)) {
    throw UnreadableMemory(operand.pid, error);
  }
}

void fill_window(char* memory, size_t window, size_t offset, const void* from, size_t bytes) {
  const size_t position = offset % window;
  const size_t first = std::min(bytes, window - position);
  copy_far(memory + position, from, first);
  copy_far(memory, static_cast<const char*>(from) + first, bytes - first);
}

void for_blocks(
    const std::vector<Operand>& operands,
    size_t item,
    size_t from,
    size_t to,
    const std::function<void(const std::vector<const void*>& inputs, size_t begin, size_t count)>& use) {
  const auto foreign =
      static_cast<size_t>(std::count_if(operands.begin(), operands.end(), [](const Operand& operand) { return operand.pid != 0; }));
  const size_t block = std::clamp(kStepBytes / std::max<size_t>(operands.size(), 1), kLeastBlock, kLargestBlock);
  const size_t step = foreign == 0 ? std::max<size_t>(to - from, 1) : std::max<size_t>(block / item, 1);
  // Kept from call to call: fresh memory would be faulted in page by page every time.
  thread_local std::vector<char> copies;
  if (copies.size() < foreign * step * item) {
    copies.resize(foreign * step * item);
  }
  std::vector<const void*> inputs(operands.size());
  for (size_t begin = from; begin < to;) {
    size_t count = std::min(step, to - begin);
    for (const auto& operand : operands) {
      if (operand.window != 0) { // its size is a multiple of every item's
        count = std::min(count, (operand.window - begin * item % operand.window) / item);
      }
    }
    auto* copy = copies.data();
    for (size_t i = 0; i < operands.size(); ++i) {
      const auto* memory = static_cast<const char*>(operands[i].data);
      if (operands[i].pid != 0) {
        read_operand(operands[i], begin * item, copy, count * item, 0);
        inputs[i] = copy;
        copy += step * item;
      } else {
        inputs[i] = memory + (operands[i].window != 0 ? begin * item % operands[i].window : begin * item);
      }
    }
    use(inputs, begin, count);
    begin += count;
  }
}

} // namespace fog
