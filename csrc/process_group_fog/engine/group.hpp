// The engine's state of a group: its members, operations in flight, and failure.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/early_messages.hpp"
#include "core/failure.hpp"
#include "core/machines.hpp"
#include "transport/transport.hpp"
#include "engine/name_table.hpp"
#include "engine/operation.hpp"

namespace fog {

class Engine;

struct Member {
  int peer_id = 0;
  int pid = 0;
  int host = 0; // index of the host, in the order of first appearance
  std::string host_id;
  std::string host_name;
};

// The engine's lock guards all members except the const ones.
class Group {
 public:
  Group(Engine& engine, uint64_t id, std::string name, int rank, std::vector<Member> members);

  Engine& engine;
  const uint64_t id;
  const std::string name;
  const int rank;
  const std::vector<Member> members; // by group rank
  const Layout layout; // of all members, by group rank

  int size() const {
    return static_cast<int>(members.size());
  }
  // The group rank of a world rank; -1 if it is not a member.
  int group_rank(int peer_id) const;
  // "rank 2 (pid 71 on host a)"
  std::string describe_member(int rank) const;
  // Throws DistBackendError if the rank is known to have left the group.
  void check_present(int rank) const;

  Transport* transport = nullptr;
  // Operations that the engine has to step.
  std::deque<std::shared_ptr<Operation>>* ready = nullptr;

  uint64_t next_key = 0; // key of the next operation without a name
  uint64_t sequence = 0; // number of the next operation in messages and records, counting all operations
  uint64_t sent_messages = 0; // of operations
  uint64_t sent_bytes = 0; // bytes of data in these messages
  std::unordered_map<int, PeerTraffic> traffic; // by group rank, while there is an observer
  uint64_t next_window = 0;
  NameTable names; // names of operations
  std::unordered_map<uint64_t, std::shared_ptr<Operation>> by_key; // collectives in flight
  std::unordered_set<std::shared_ptr<Operation>> operations; // all operations in flight, including point-to-point
  std::unordered_map<uint64_t, std::list<EarlyMessage>> early; // by key
  std::list<std::shared_ptr<Operation>> posted; // receives without a message, oldest first
  std::list<EarlyMessage> unexpected; // point-to-point messages without a receive, oldest first
  std::unordered_map<int, std::string> gone; // group ranks that have left, and why
  std::function<void(const std::string& which)> when_lost; // see Engine::call_when_lost()
  Failure failure;
  // The failure as the members tell each other.
  struct News {
    int origin; // group rank that reported it first
    std::string text;
    std::unordered_set<int> told; // group ranks that this rank has told, or that told this rank
  };
  std::optional<News> news; // set if the members are to be told
  bool closed = false;

 private:
  std::unordered_map<int, int> group_ranks_;
};

// Puts `operation` into its group's ready queue unless it is there already.
void make_ready(const std::shared_ptr<Operation>& operation);

// Message keys: program order counts up from 0, names have the top bit set.
constexpr uint64_t kNamedKey = uint64_t(1) << 63;
uint64_t key_of_name(OpKind kind, const std::string& name);

} // namespace fog
