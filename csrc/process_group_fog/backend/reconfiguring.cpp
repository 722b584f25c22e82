// c10d's reconfigure: a process group whose members change, among ranks that have met once.
#include "backend/process_group_fog.hpp"

#ifdef C10D_BACKEND_HAS_RECONFIGURE

#include <algorithm>
#include <charconv>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "core/failure.hpp"
#include "engine/engine.hpp"

namespace fog {
namespace {

// "fog:<id of the ranks that have met>:<rank among them>"
std::string prefix_of(const Group& world) {
  return c10::str("fog:", world.id, ":");
}

int rank_of(const std::string& handle, const Group& world) {
  const auto prefix = prefix_of(world);
  int rank = -1;
  const auto* end = handle.data() + handle.size();
  const bool is_known = handle.compare(0, prefix.size(), prefix) == 0;
  const auto parsed = is_known ? std::from_chars(handle.data() + prefix.size(), end, rank) : std::from_chars_result{};
  TORCH_CHECK_VALUE(
      is_known && parsed.ec == std::errc() && parsed.ptr == end && rank >= 0 && rank < world.size(), "reconfigure: handles: got '",
      handle, "'; allowed are handles of the ", world.size(), " ranks with which group '", world.name, "' was created, such as '",
      prefix, "0'. A process that was started later joins by FOG_JOIN=1");
  return rank;
}

} // namespace

void ProcessGroupFog::await_reconfiguration() {
  world_ = group_;
  world_->engine.refuse_work(
      world_, "group '" + world_->name + "' was created with enable_reconfigure, and takes no work before reconfigure()");
}

void ProcessGroupFog::check_reconfigures(const char* op) const {
  TORCH_CHECK_WITH(
      DistBackendError, world_, "fog: ", op, ": group '", group_->name, "' was created without enable_reconfigure, and its ranks stay");
}

c10d::ReconfigureHandle ProcessGroupFog::get_reconfigure_handle() const {
  check_reconfigures("get_reconfigure_handle");
  return c10::str(prefix_of(*world_), world_->rank);
}

std::vector<int> ProcessGroupFog::ranks_of_handles(const c10d::ReconfigureOptions& given) const {
  std::vector<int> ranks;
  if (const auto* ordered = std::get_if<std::vector<c10d::ReconfigureHandle>>(&given.handles)) {
    for (const auto& handle : *ordered) {
      ranks.push_back(rank_of(handle, *world_));
      TORCH_CHECK_VALUE(
          std::count(ranks.begin(), ranks.end(), ranks.back()) == 1, "reconfigure: handles: got '", handle, "' more than once");
    }
  } else {
    for (const auto& handle : std::get<0>(given.handles)) {
      ranks.push_back(rank_of(handle, *world_));
    }
    std::sort(ranks.begin(), ranks.end());
  }
  TORCH_CHECK_VALUE(
      std::count(ranks.begin(), ranks.end(), world_->rank) == 1, "reconfigure: handles: got ", ranks.size(),
      " handles without this rank's own; it must be one of them");
  return ranks;
}

std::shared_ptr<Group> ProcessGroupFog::exchange_group(std::shared_ptr<Group> group) {
  std::swap(group_, group);
  rank_ = group_->rank;
  size_ = group_->size();
  return group;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupFog::reconfigure(const c10d::ReconfigureOptions& given) {
  check_reconfigures("reconfigure");
  const auto ranks = ranks_of_handles(given);
  TORCH_CHECK_WITH(
      DistBackendError, used_uuids_.insert(given.uuid).second, "fog: reconfigure: uuid: got ", given.uuid,
      ", which was already used with group '", world_->name, "'; allowed is a number that was not");
  auto& engine = world_->engine;
  // Its id follows from the uuid and the members in their order, so it needs no message. Ranks that were given others meet
  // nobody, until the timeout.
  const auto before = exchange_group(engine.add_part(*world_, static_cast<uint64_t>(given.uuid), world_->name, ranks));
  try {
    c10d::BarrierOptions options;
    options.timeout = given.timeout.value_or(options_->timeout);
    barrier(options)->wait();
  } catch (const std::exception& error) {
    engine.close(exchange_group(before));
    C10_THROW_ERROR(
        DistBackendError,
        c10::str(
            "fog: reconfigure: uuid ", given.uuid, ": the ranks ", ranks, " of those that group '", world_->name,
            "' was created with did not all come, and the group stays as it was: ", message_of(error)));
  }
  if (before != world_) {
    engine.close(before);
  }
  return when_all(c10d::OpType::BARRIER, {});
}

} // namespace fog

#endif
