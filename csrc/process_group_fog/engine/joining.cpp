#include "engine/joining.hpp"

#include <algorithm>
#include <thread>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/StringUtil.h>

#include "core/deadline.hpp"
#include "core/failure.hpp"
#include "engine/process_engine.hpp"
#include "job/hosts.hpp"
#include "job/peer_information.hpp"
#include "job/mpi_runtime.hpp"
#include "job/network_interface.hpp"
#include "job/peer_sockets.hpp"
#include "job/process_watch.hpp"
#include "job/secret.hpp"
#include "transport/process_transport.hpp"
#include "transport/shared_memory/arena.hpp"
#include "transport/shared_memory/inbox.hpp"
#include "transport/shared_memory/links.hpp"
#include "transport/tcp/connections.hpp"
#include "transport/tcp/handshake.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

// Between two looks at the other side, which is about to connect.
constexpr auto kPause = std::chrono::microseconds(200);
// How long a process of another host may take to hear a call for attention.
constexpr auto kCall = std::chrono::seconds(3);
// A process of another host that is not connected after this time is called; it lives if it hears that.
constexpr auto kDoubt = std::chrono::milliseconds(500);
constexpr auto kShortCall = std::chrono::seconds(1);
constexpr const char* kNotConnected = "was lost: it joined, but did not connect in time";

bool is_here(const PeerInformation& peer) {
  return peer.host == Runtime::instance().host();
}

// Whether this process can look into that one's memory, if it has not ended.
bool is_visible(const PeerInformation& peer) {
  return peer.host_id == host_id() && !peer.address.empty();
}

// Admits a process on a member. The rank that has let it join has seen that the process before it ended; this process
// may learn that a moment later. If it does not, it goes on without the new one, and so do the others with the next epoch.
void admit(Engine& engine, int rank, const PeerInformation& peer, Deadline deadline) {
  while (true) {
    try {
      engine.admit(rank, peer, is_here(peer));
      return;
    } catch (const c10::DistBackendError& error) {
      if (Clock::now() >= deadline) {
        LOG(WARNING) << message_of(error);
        engine.give_up(rank, Peer::State::kSilent, kNoSign);
        return;
      }
    }
    engine.check_interrupt();
    std::this_thread::sleep_for(kPause);
  }
}

// Throws DistBackendError if this process has another version or setting than a rank of the job.
void check_alike(const PeerInformation& mine, const PeerInformation& first) {
  TORCH_CHECK_WITH(
      DistBackendError, mine.protocol == first.protocol,
      "fog: this process cannot join the job, which has another version: the job's is ", first.protocol, "; this one's is ",
      mine.protocol);
  TORCH_CHECK_WITH(
      DistBackendError, mine.between_hosts == first.between_hosts, "fog: this process cannot join the job: FOG_BETWEEN_HOSTS is '",
      mine.between_hosts, "' here, and '", first.between_hosts, "' on the job's ranks");
}

// Returns whether this process and all members are on one host, and share its memory.
bool share_memory(const PeerInformation& mine, const std::vector<PeerInformation>& members) {
  return mine.links &&
      std::all_of(members.begin(), members.end(), [&](const PeerInformation& member) { return is_visible(member) && member.links; });
}

// The name of this process's host: that which the members there have for it, or a new one if none is left.
std::string host_among(const std::vector<PeerInformation>& members) {
  for (const auto& member : members) {
    if (is_visible(member) && shared_memory::Inbox::announce(member.address)) {
      return member.host;
    }
  }
  return host_id() + "#joined";
}

} // namespace

std::string own_entry() {
  const auto& runtime = Runtime::instance();
  const auto* transport = process_transport();
  if (transport == nullptr || !runtime.joined()) {
    return {};
  }
  auto mine = own_information();
  mine.job = runtime.job();
  mine.world_rank = runtime.rank();
  mine.host = runtime.host();
  mine.max_ranks = runtime.max_ranks();
  mine.address = transport->address();
  process_engine().with_lock([&] {
    auto& connections = *process_connections();
    // In a job on one host nobody has listened: a process of another host may join now.
    mine.tcp = job_secret().empty() ? connections.line() : connections.listen(addresses_towards(""));
  });
  return to_text(mine);
}

bool is_visible(const std::string& entry) {
  return is_visible(read_peer_information(entry));
}

bool announce(const std::string& entry) {
  const auto peer = read_peer_information(entry);
  if (is_visible(peer)) {
    return shared_memory::Inbox::announce(peer.address);
  }
  return !peer.tcp.empty() && tcp::call_to_join(peer.tcp, peer.world_rank, kCall);
}

void prepare_to_join(
    int rank, int size, const std::vector<std::string>& entries, const std::string& store_host, std::chrono::milliseconds timeout) {
  auto& runtime = Runtime::instance();
  auto& engine = process_engine();
  use_settings();
  TORCH_CHECK_VALUE(!entries.empty(), "prepare_to_join: entries: got none; allowed is at least one");
  TORCH_CHECK_WITH(
      DistBackendError, !runtime.joined() && process_transport() == nullptr,
      "fog: this process has a world already, and cannot join another job");
  std::vector<PeerInformation> members;
  for (const auto& entry : entries) {
    members.push_back(read_peer_information(entry));
  }
  const auto mine = own_information();
  check_alike(mine, members.front());
  const bool uses_tcp = !share_memory(mine, members);
  TORCH_CHECK_WITH(
      DistBackendError, !uses_tcp || mine.secret_mark == members.front().secret_mark,
      "fog: this process cannot join the job: it does not know the job's secret (FOG_JOB_SECRET)"); // no rank would hear it
  const auto host = uses_tcp ? host_among(members) : members.front().host;
  const auto neighbors = std::count_if(members.begin(), members.end(), [&](const PeerInformation& each) { return each.host == host; });
  const int max_ranks = members.front().max_ranks;
  auto links = std::make_unique<shared_memory::Links>(rank, size, max_ranks, mine.links);
  TORCH_CHECK_VALUE(
      rank < links->max_ranks(), "prepare_to_join: rank: got ", rank, "; allowed are ranks below ", links->max_ranks(),
      ", the most that the job can have (FOG_MAX_RANKS)");
  TORCH_CHECK_VALUE(
      !uses_tcp || rank < size, "prepare_to_join: rank: got ", rank, "; allowed are ranks below ", size,
      ", with which the job began, unless all its ranks share one host: a process takes the number of a rank that is gone");
  shared_memory::Arena::expect_ranks(uses_tcp ? static_cast<int>(neighbors) + 1 : links->max_ranks());
  links->settle(links->max_ranks());
  TORCH_CHECK_WITH(
      DistBackendError, uses_tcp || !links->address(true).empty(),
      "fog: this process cannot join the job: the system gives it no shared memory");
  auto connections = std::make_unique<tcp::Connections>();
  if (uses_tcp) {
    const auto own = addresses_towards(store_host);
    TORCH_CHECK_WITH(
        DistBackendError, !connections->listen(own).empty(),
        "fog: this process cannot join the job: the system forbids to listen at a TCP port");
  }
  engine.start_threads(timeout);
  runtime.settle(host, std::vector<int>(static_cast<size_t>(size), 0));
  runtime.join(members.front().job, rank, size, max_ranks);
  make_process_transport(std::move(links), std::move(connections), nullptr);
}

std::shared_ptr<Group> add_whole(
    uint64_t id, const std::string& name, int rank, const std::vector<int>& hosts, const std::string& reason) {
  std::vector<Member> members;
  const auto& runtime = Runtime::instance();
  for (size_t member = 0; member < hosts.size(); ++member) {
    members.push_back({static_cast<int>(member), 0, hosts[member], runtime.host(), host_name()});
  }
  auto& engine = process_engine();
  auto group = engine.add_group(id, name, rank, std::move(members), {});
  engine.refuse_work(group, reason);
  return group;
}

std::vector<int> connect_with(const std::map<int, std::string>& entries, bool is_member, std::chrono::milliseconds timeout) {
  auto& engine = process_engine();
  const auto deadline = deadline_after(timeout);
  const bool shares = !process_transport()->address().empty();
  std::map<int, PeerInformation> peers;
  std::vector<int> come;
  ProcessWatch processes;
  // On one host, members attach first, and a process that joins attaches each member that has done so. Between hosts
  // the order does not matter: a connection is open once both sides know of each other.
  const auto waits = [&](const PeerInformation& peer) { return !is_member && shares && is_here(peer) && !peer.address.empty(); };
  for (const auto& [rank, entry] : entries) {
    const auto& peer = peers[rank] = read_peer_information(entry);
    if (is_here(peer)) {
      processes.watch(rank, peer.pid);
    }
    if (!waits(peer)) {
      admit(engine, rank, peer, deadline);
    }
  }
  for (const auto& [rank, peer] : peers) {
    bool connected = false;
    try {
      auto doubt = Clock::now() + kDoubt;
      while (!(connected = engine.is_connected_with(rank)) && !processes.has_ended(rank) && Clock::now() < deadline) {
        engine.check_interrupt();
        std::this_thread::sleep_for(kPause);
        if (Clock::now() >= doubt && !is_here(peer)) {
          if (!tcp::call_to_join(peer.tcp, rank, kShortCall)) {
            break;
          }
          doubt = Clock::now() + kDoubt;
        }
      }
    } catch (const Unreachable&) {
      continue;
    }
    if (!connected) {
      const bool ended = processes.has_ended(rank);
      engine.give_up(rank, ended ? Peer::State::kLost : Peer::State::kSilent, ended ? kLost : kNotConnected);
      continue;
    }
    if (waits(peer)) {
      admit(engine, rank, peer, deadline);
    }
    come.push_back(rank);
  }
  return come;
}

} // namespace fog
