#include "operand.hpp"

#include <algorithm>
#include <cstring>
#include <memory>

#include "../shared_memory/process_memory.hpp"

namespace fog::mpi {
namespace {

// All blocks of one step together stay below a usual second-level cache; each is large enough for the system call that
// fetches it to be cheap beside the copy.
constexpr size_t kStepBytes = size_t(512) << 10;
constexpr size_t kLeastBlock = size_t(16) << 10;
constexpr size_t kLargestBlock = size_t(128) << 10;

} // namespace

UnreadableMemory::UnreadableMemory(int process, int error) : std::runtime_error(std::strerror(error)), pid(process) {}

void read_operand(const Operand& operand, size_t offset, void* to, size_t bytes) {
  const auto* from = static_cast<const char*>(operand.data) + offset;
  if (operand.pid == 0) {
    std::memcpy(to, from, bytes);
    return;
  }
  if (const int error = shared_memory::read_process_memory(operand.pid, from, to, bytes)) {
    throw UnreadableMemory(operand.pid, error);
  }
}

void for_blocks(
    const std::vector<Operand>& operands,
    size_t item,
    size_t numel,
    const std::function<void(const std::vector<const void*>& inputs, size_t begin, size_t count)>& use) {
  const auto foreign = static_cast<size_t>(
      std::count_if(operands.begin(), operands.end(), [](const Operand& operand) { return operand.pid != 0; }));
  const size_t block = std::clamp(kStepBytes / std::max<size_t>(operands.size(), 1), kLeastBlock, kLargestBlock);
  const size_t step = foreign == 0 ? std::max<size_t>(numel, 1) : std::max<size_t>(block / item, 1);
  // Kept from call to call: fresh memory would be faulted in page by page every time.
  thread_local std::vector<char> copies;
  if (copies.size() < foreign * step * item) {
    copies.resize(foreign * step * item);
  }
  std::vector<const void*> inputs(operands.size());
  for (size_t begin = 0; begin < numel; begin += step) {
    const size_t count = std::min(step, numel - begin);
    auto* copy = copies.data();
    for (size_t i = 0; i < operands.size(); ++i) {
      if (operands[i].pid == 0) {
        inputs[i] = static_cast<const char*>(operands[i].data) + begin * item;
      } else {
        read_operand(operands[i], begin * item, copy, count * item);
        inputs[i] = copy;
        copy += step * item;
      }
    }
    use(inputs, begin, count);
  }
}

} // namespace fog::mpi
