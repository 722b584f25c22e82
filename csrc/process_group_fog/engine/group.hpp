// A group of ranks as the engine sees it: who they are, what is in flight, what has failed.
#pragma once

#include <chrono>
#include <deque>
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
#include "transport/network_sums.hpp"
#include "transport/transport.hpp"
#include "engine/name_table.hpp"
#include "engine/operation.hpp"

namespace fog {

class Engine;

struct Member {
  int peer_id = 0;
  int pid = 0;
  int host = 0; // index, by first appearance
  std::string host_id;
  std::string host_name;
};

// All members are guarded by the engine's lock, but those that are const.
class Group {
 public:
  Group(Engine& engine, uint64_t id, std::string name, int rank, std::vector<Member> members);

  Engine& engine;
  const uint64_t id;
  const std::string name;
  const int rank;
  const std::vector<Member> members; // by group rank
  const Layout layout; // all members, by group rank

  int size() const {
    return static_cast<int>(members.size());
  }
  // Group rank of a rank of the world, -1 if it is not a member.
  int group_rank(int peer_id) const;
  // "rank 2 (pid 71 on host a)"
  std::string describe_member(int rank) const;
  // Throws DistBackendError if that rank is known to have left the group.
  void check_present(int rank) const;

  Transport* transport = nullptr;
  std::shared_ptr<NetworkSums> sums; // null where all sums are fog's own; does not change once the group is made
  // Operations with something to do; the engine steps them.
  std::deque<std::shared_ptr<Operation>>* ready = nullptr;

  uint64_t next_key = 0; // of operations without a name
  uint64_t sequence = 0; // of all operations, for people
  uint64_t sent_messages = 0; // by operations
  uint64_t sent_bytes = 0; // of data, in these
  std::unordered_map<int, PeerTraffic> traffic; // by group rank, while somebody observes
  uint64_t next_window = 0;
  NameTable names; // of operations
  std::unordered_map<uint64_t, std::shared_ptr<Operation>> by_key; // collectives in flight
  std::unordered_set<std::shared_ptr<Operation>> operations; // all in flight, point-to-point as well
  std::unordered_map<uint64_t, std::list<EarlyMessage>> early; // by key
  std::list<std::shared_ptr<Operation>> posted; // receives without a message, oldest first
  std::list<EarlyMessage> unexpected; // point-to-point messages without a receive, oldest first
  std::unordered_map<int, std::string> gone; // group ranks that take no further part, and why
  Failure failure;
  // The failure as members tell each other.
  struct News {
    int origin; // group rank that it is the words of
    std::string text;
    std::unordered_set<int> told; // group ranks that this one has told, or that told it
  };
  std::optional<News> news; // if they are to be told
  bool closed = false;

 private:
  std::unordered_map<int, int> group_ranks_;
};

// Puts `operation` into its group's ready queue, once.
void make_ready(const std::shared_ptr<Operation>& operation);

// Message keys: program order counts up from 0, names have the top bit set.
constexpr uint64_t kNamedKey = uint64_t(1) << 63;
uint64_t key_of_name(OpKind kind, const std::string& name);

} // namespace fog
