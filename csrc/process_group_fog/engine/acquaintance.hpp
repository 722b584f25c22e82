// What a process knows about the members of a group that is being created.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/group.hpp"

namespace fog {

// An older group that contains all members of a new one, and their ranks in it; null if there is none.
struct Acquaintance {
  std::shared_ptr<Group> group;
  std::vector<int> ranks;

  // Returns how those of these members are called whose processes have ended, or that were declared lost. From now on
  // the ends of all of them are noticed.
  std::map<int, std::string> gone(const std::vector<int>& members) const;
};

} // namespace fog
