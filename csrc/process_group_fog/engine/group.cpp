#include "engine/group.hpp"

#include <algorithm>
#include <numeric>
#include <sstream>

#include <c10/util/Exception.h>

namespace fog {
namespace {

Layout layout_of_members(const std::vector<Member>& members, int rank) {
  std::vector<int> ranks(members.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<int> hosts;
  for (const auto& member : members) {
    hosts.push_back(member.host);
  }
  return layout_of(std::move(ranks), hosts, rank);
}

} // namespace

Group::Group(Engine& its_engine, uint64_t group_id, std::string group_name, int group_rank, std::vector<Member> group_members)
    : engine(its_engine),
      id(group_id),
      name(std::move(group_name)),
      rank(group_rank),
      members(std::move(group_members)),
      layout(layout_of_members(members, group_rank)) {
  for (int member = 0; member < size(); ++member) {
    group_ranks_.emplace(members[member].peer_id, member);
  }
}

int Group::group_rank(int peer_id) const {
  const auto found = group_ranks_.find(peer_id);
  return found == group_ranks_.end() ? -1 : found->second;
}

std::string Group::describe_member(int member) const {
  std::ostringstream text;
  text << "rank " << member << " (pid " << members[member].pid << " on host " << members[member].host_name << ")";
  return text.str();
}

void Group::check_present(int member) const {
  const auto found = gone.find(member);
  if (found != gone.end()) {
    C10_THROW_ERROR(DistBackendError, describe_member(member) + ' ' + found->second);
  }
}

void make_ready(const std::shared_ptr<Operation>& operation) {
  if (!operation->queued && !operation->ended()) {
    operation->group()->ready->push_back(operation);
    operation->queued = true;
  }
}

uint64_t key_of_name(OpKind kind, const std::string& name) {
  uint64_t hash = hash_more(kEmptyHash, static_cast<int64_t>(kind));
  return hash_more(hash, name.data(), name.size()) | kNamedKey;
}

} // namespace fog
