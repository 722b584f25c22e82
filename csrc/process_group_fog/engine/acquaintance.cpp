#include "engine/acquaintance.hpp"

#include <algorithm>

#include "engine/engine.hpp"

namespace fog {

std::map<int, std::string> Acquaintance::gone(const std::vector<int>& members) const {
  std::vector<int> asked;
  for (const int member : members) {
    asked.push_back(ranks.at(static_cast<size_t>(member)));
  }
  auto& engine = group->engine;
  engine.watch(*group, asked);
  const auto lost = engine.lost_ranks(*group);
  std::map<int, std::string> gone;
  for (size_t i = 0; i < members.size(); ++i) {
    const bool is_lost = std::find(lost.begin(), lost.end(), asked[i]) != lost.end();
    // A rank may have closed the older group and still come.
    if (is_lost || engine.has_left(group->members[asked[i]].peer_id)) {
      gone.emplace(members[i], group->describe_member(asked[i]) + " of group '" + group->name + "'");
    }
  }
  return gone;
}

} // namespace fog
