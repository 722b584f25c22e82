#include "engine/name_table.hpp"

namespace fog {

bool NameTable::is_of_latest(uint64_t key, int source, Use there, bool expected) {
  auto& name = *by_key_.at(key);
  const auto latest = static_cast<uint16_t>(name.uses - 1);
  if (name.generation == 0 && there.generation == 0) {
    return there.number == latest;
  }
  const auto found = name.others.find(source);
  if (found != name.others.end() && found->second.generation == there.generation) {
    return static_cast<uint16_t>(there.number + found->second.offset) == latest;
  }
  if (expected) {
    name.others[source] = {there.generation, static_cast<uint16_t>(latest - there.number)};
  }
  return expected;
}

std::optional<int> NameTable::uses_since(uint64_t key, int source, Use there) const {
  const auto known = by_key_.find(key);
  if (known == by_key_.end()) {
    return std::nullopt;
  }
  const auto& name = *known->second;
  int offset = 0;
  if (name.generation != 0 || there.generation != 0) {
    const auto found = name.others.find(source);
    if (found == name.others.end() || found->second.generation != there.generation) {
      return std::nullopt;
    }
    offset = found->second.offset;
  }
  return static_cast<int16_t>(name.uses - 1 - (there.number + offset)); // the numbers wrap around
}

} // namespace fog
