#include "core/machines.hpp"

#include <algorithm>

#include <c10/util/Exception.h>

namespace fog {

Machines::Machines(const char* op, std::vector<std::vector<int>> ranks, int rank, int size) : ranks_(std::move(ranks)) {
  std::vector<bool> seen(static_cast<size_t>(size), false);
  for (size_t machine = 0; machine < ranks_.size(); ++machine) {
    for (size_t place = 0; place < ranks_[machine].size(); ++place) {
      const int member = ranks_[machine][place];
      TORCH_CHECK_VALUE(
          member >= 0 && member < size, op, ": machines: got rank ", member, "; allowed are ranks 0 to ", size - 1,
          " of this group of ", size);
      TORCH_CHECK_VALUE(!seen[member], op, ": machines: rank ", member, " is there twice; each rank belongs to one machine");
      seen[member] = true;
      if (member == rank) {
        machine_ = static_cast<int>(machine);
        place_ = static_cast<int>(place);
      }
    }
  }
  for (int member = 0; member < size; ++member) {
    TORCH_CHECK_VALUE(seen[member], op, ": machines: rank ", member, " is missing; each rank of the group belongs to one machine");
  }
}

int Machines::least() const {
  size_t least = ranks_[0].size();
  for (const auto& machine : ranks_) {
    least = std::min(least, machine.size());
  }
  return static_cast<int>(least);
}

int Machines::machine_of(int rank) const {
  const auto found = std::find_if(ranks_.begin(), ranks_.end(), [rank](const std::vector<int>& machine) {
    return std::find(machine.begin(), machine.end(), rank) != machine.end();
  });
  return static_cast<int>(found - ranks_.begin());
}

void Machines::check_equal(const char* op) const {
  for (const auto& machine : ranks_) {
    TORCH_CHECK_VALUE(
        machine.size() == ranks_[0].size(), op, ": machines: got machines of ", ranks_[0].size(), " and of ", machine.size(),
        " ranks; allowed are machines of equal size");
  }
}

void Machines::sign(Signature& signature) const {
  uint64_t hash = hash_more(kEmptyHash, signature.layout);
  for (const auto& machine : ranks_) {
    hash = hash_more(hash, static_cast<int64_t>(machine.size()));
    for (const int rank : machine) {
      hash = hash_more(hash, rank);
    }
  }
  signature.machines = static_cast<uint32_t>(ranks_.size());
  signature.layout = mark(hash);
}

} // namespace fog
