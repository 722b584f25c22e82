#include "core/machines.hpp"

#include <algorithm>
#include <map>

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
    }
  }
  for (int member = 0; member < size; ++member) {
    TORCH_CHECK_VALUE(seen[member], op, ": machines: rank ", member, " is missing; each rank of the group belongs to one machine");
  }
  find(rank);
}

Machines::Machines(std::vector<std::vector<int>> ranks, int rank) : ranks_(std::move(ranks)) {
  find(rank);
}

void Machines::find(int rank) {
  least_ = most_ = static_cast<int>(ranks_[0].size());
  for (size_t machine = 0; machine < ranks_.size(); ++machine) {
    const auto& members = ranks_[machine];
    least_ = std::min(least_, static_cast<int>(members.size()));
    most_ = std::max(most_, static_cast<int>(members.size()));
    for (size_t place = 0; place < members.size(); ++place) {
      const int member = members[place];
      if (static_cast<size_t>(member) >= where_.size()) {
        where_.resize(static_cast<size_t>(member) + 1);
      }
      where_[member] = {static_cast<int>(machine), static_cast<int>(place)};
    }
  }
  machine_ = machine_of(rank);
  place_ = place_of(rank);
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

Layout layout_of(std::vector<int> ranks, const std::vector<int>& hosts, int rank) {
  std::vector<std::vector<int>> divided;
  std::map<int, size_t> places; // index of each host, by first appearance
  for (size_t i = 0; i < ranks.size(); ++i) {
    const size_t place = places.emplace(hosts[i], divided.size()).first->second;
    divided.resize(std::max(divided.size(), place + 1));
    divided[place].push_back(ranks[i]);
  }
  const int place = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  return {std::move(ranks), place, Machines(std::move(divided), rank)};
}

} // namespace fog
