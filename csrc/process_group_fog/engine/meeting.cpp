#include "engine/meeting.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "core/failure.hpp"
#include "engine/process_engine.hpp"
#include "job/mpi_runtime.hpp"
#include "job/network_interface.hpp"
#include "job/secret.hpp"
#include "transport/process_transport.hpp"
#include "transport/shared_memory/arena.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

// How long the first rank of a host waits for the probe of the next host, which runs beside other work.
constexpr auto kProbeLimit = std::chrono::milliseconds(250);

} // namespace

// The second message of a rank, after it knows the others' introductions; its text has a line for each member.
struct Meeting::Place {
  std::string host;
  bool linked = false; // the rank shares memory with all others
  std::string address; // as in Introduction, with its arena
  std::string listener; // address for connections of other hosts' ranks, if the host names show that there are any
  std::string tcp; // address for messages over TCP, if the job uses that
};

std::string Meeting::to_text(const Place& place) {
  return place.host + '\n' + (place.linked ? '1' : '0') + '\n' + place.address + '\n' + place.tcp + '\n' + place.listener + '\n';
}

Meeting::Place Meeting::read_place(const std::string& text) {
  std::istringstream lines(text);
  Place place;
  std::string linked;
  std::getline(lines, place.host);
  std::getline(lines, linked);
  place.linked = linked == "1";
  std::getline(lines, place.address);
  std::getline(lines, place.tcp);
  std::getline(lines, place.listener);
  return place;
}

Meeting::Meeting(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout, Rendezvous::Gone gone)
    : rendezvous_(std::make_shared<Rendezvous>(store, rank, size, timeout, std::move(gone))), timeout_(timeout) {}

Meeting::~Meeting() {
  if (monitor_) { // no transport was created
    use_sockets(nullptr, nullptr);
    forget_job_secret();
  }
}

bool Meeting::is_world() const {
  return !Runtime::instance().joined() || Runtime::instance().size() == rendezvous_->size();
}

bool Meeting::names_differ() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [&](const Introduction& rank) { return rank.host_id != ranks_[0].host_id; });
}

bool Meeting::has_several_hosts() const {
  return std::any_of(places_.begin(), places_.end(), [&](const Place& place) { return place.host != places_[0].host; });
}

void Meeting::meet(const std::string& name, SumsBy sums) {
  const auto& runtime = Runtime::instance();
  const bool joined = runtime.joined();
  auto mine = introduce();
  mine.reduce = name_of(sums);
  mine.beacon = beacon_.name();
  mine.launched = Runtime::launched(rendezvous_->rank(), rendezvous_->size());
  mine.job = runtime.job();
  mine.host = runtime.host();
  if (joined) {
    mine.max_ranks = runtime.max_ranks();
  }
  if (const auto* made = process_transport()) {
    mine.address = made->address();
  } else {
    links_ = std::make_unique<shared_memory::Links>(
        joined ? runtime.rank() : rendezvous_->rank(), joined ? runtime.size() : rendezvous_->size(), mine.max_ranks,
        has_local_links());
    mine.address = links_->address(false);
    monitor_ = std::make_unique<PeerMonitor>();
    connections_ = std::make_unique<tcp::Connections>();
    use_sockets(monitor_.get(), connections_.get());
  }
  if (rendezvous_->is_in_file()) {
    mine.offered_secret.clear();
  }
  mine.world_rank = joined ? runtime.rank() : rendezvous_->rank();
  for (const auto& text : rendezvous_->allgather("rank", fog::to_text(mine))) {
    ranks_.push_back(read_introduction(text));
  }
  check_alike(ranks_);
  check_one_world(name);
  settle_secret(ranks_);
  for (const auto& rank : ranks_) {
    places_.push_back({rank.host, false, rank.address, "", ""});
  }
  if (std::all_of(ranks_.begin(), ranks_.end(), [](const Introduction& rank) { return !rank.host.empty(); })) {
    return;
  }
  find_places();
  check_secret();
  const bool apart = is_world() && has_several_hosts();
  const auto probe = apart ? probe_next_host() : nullptr;
  if (links_) {
    make_transport();
  }
  if (apart) {
    watch_other_hosts(probe.get());
  }
}

void Meeting::check_one_world(const std::string& name) const {
  const int rank = rendezvous_->rank();
  for (size_t peer = 0; peer < ranks_.size(); ++peer) {
    TORCH_CHECK_WITH(
        DistBackendError, ranks_[peer].job == ranks_[rank].job, "fog: rank ", peer, " of group '", name,
        "' belongs to another MPI world than this rank ", rank,
        ": the first fog group of each process fixes its world, and this group spans two of them. Make a fog group of all ranks first.");
  }
}

// Ranks that reach each other by fog's own connections have to prove that they know a secret.
void Meeting::check_secret() const {
  const bool all_share = std::all_of(ranks_.begin(), ranks_.end(), [](const Introduction& rank) { return rank.links; });
  TORCH_CHECK_WITH(
      DistBackendError, !job_secret().empty() || (!has_several_hosts() && (all_share || between_hosts() != BetweenHosts::kTcp)),
      "fog: these ranks need a secret to connect with each other, and none is passed through a store that is a file: set "
      "FOG_JOB_SECRET to the same text of at least 16 characters on all ranks");
}

// Returns whether all ranks of the world create their first group, so that all have the same knowledge of each other.
bool Meeting::is_new_world() const {
  return is_world() && std::all_of(ranks_.begin(), ranks_.end(), [](const Introduction& rank) { return rank.host.empty(); });
}

void Meeting::find_places() {
  auto& engine = process_engine();
  const int rank = rendezvous_->rank();
  const bool uses_tcp = between_hosts() == BetweenHosts::kTcp;
  std::vector<int> local; // ranks of this host, according to the names
  for (size_t peer = 0; peer < ranks_.size(); ++peer) {
    if (ranks_[peer].host_id == ranks_[rank].host_id) {
      local.push_back(ranks_[peer].world_rank);
    }
  }
  if (links_ && is_new_world() && local.size() == ranks_.size()) { // places for ranks that join
    for (int later = rendezvous_->size(); later < ranks_[rank].max_ranks; ++later) {
      local.push_back(later);
    }
  }
  shared_memory::Arena::expect_ranks(static_cast<int>(local.size()));
  Place mine{find_host(ranks_, rank), false, ranks_[rank].address, is_world() && names_differ() ? listen() : "", ""};
  mine.tcp = listen_for_messages();
  if (links_) {
    if (!is_new_world() || uses_tcp) { // other ranks of the world may come later, or another process in the place of one
      local.resize(static_cast<size_t>(Runtime::instance().joined() ? Runtime::instance().size() : rendezvous_->size()));
      std::iota(local.begin(), local.end(), 0);
    }
    links_->settle(local);
    size_t reached = 1;
    for (int member = 0; member < rendezvous_->size(); ++member) {
      const auto& peer = ranks_[member];
      if (member != rank && peer.host_id == ranks_[rank].host_id) {
        links_->attach(peer.world_rank, peer.address);
        reached += links_->reaches(peer.world_rank) ? 1 : 0;
      }
    }
    mine.linked = is_new_world() && reached == ranks_.size();
    mine.address = links_->address(true);
  }
  places_.clear();
  for (const auto& text : rendezvous_->allgather("place", to_text(mine))) {
    places_.push_back(read_place(text));
  }
  engine.with_lock([&] {
    for (int member = 0; member < rendezvous_->size(); ++member) {
      if (member != rank && !places_[member].tcp.empty()) {
        process_connections()->add(ranks_[member].world_rank, places_[member].tcp);
      }
    }
  });
  for (size_t peer = 0; peer < places_.size() && links_; ++peer) {
    if (places_[peer].host != mine.host) {
      links_->detach(ranks_[peer].world_rank);
    }
  }
}

void Meeting::make_transport() {
  auto& runtime = Runtime::instance();
  auto& engine = process_engine();
  const int rank = rendezvous_->rank();
  const int size = rendezvous_->size();
  const auto job = runtime.joined() ? runtime.job() : c10::str("fog_", ranks_[0].pid, '_', ranks_[0].random);
  if (!runtime.joined() || size == runtime.size()) {
    std::vector<std::string> hosts;
    for (const auto& place : places_) {
      hosts.push_back(place.host);
    }
    const auto local = std::count(hosts.begin(), hosts.end(), places_[rank].host);
    runtime.settle(places_[rank].host, static_cast<int>(local), number_nodes(std::move(hosts), ranks_));
  }
  // All ranks decide alike. Ranks that share a host and its memory do not need MPI, whose start takes longer than
  // everything else.
  const bool linked =
      !has_several_hosts() && std::all_of(places_.begin(), places_.end(), [](const Place& place) { return place.linked; });
  const bool launched = std::any_of(ranks_.begin(), ranks_.end(), [](const Introduction& each) { return each.launched; });
  const bool uses_mpi = between_hosts() != BetweenHosts::kTcp;
  if (uses_mpi && (runtime.started() || launched || !linked)) {
    engine.watchdog().start();
    if (!runtime.started()) {
      runtime.start(rendezvous_, job, timeout_);
    }
  }
  if (!runtime.joined()) {
    runtime.join(job, rank, size, ranks_[rank].max_ranks);
  }
  std::unique_ptr<mpi::RemoteMemory> remote_memory;
  if (uses_mpi && runtime.started()) {
    try {
      remote_memory = mpi::RemoteMemory::open(runtime, *rendezvous_, engine.watchdog(), timeout_);
    } catch (const std::exception& error) {
      runtime.fail(message_of(error));
      throw;
    }
  }
  make_process_transport(std::move(monitor_), std::move(links_), std::move(connections_), std::move(remote_memory));
}

std::string Meeting::listen() {
  const auto own = addresses_towards(rendezvous_->store_host());
  return process_engine().with_lock([&] { return process_monitor()->listen(own); });
}

std::string Meeting::listen_for_messages() {
  if (between_hosts() != BetweenHosts::kTcp || job_secret().empty()) { // without a secret nobody may connect
    return "";
  }
  const auto own = addresses_towards(rendezvous_->store_host());
  const auto line = process_engine().with_lock([&] { return process_connections()->listen(own); });
  TORCH_CHECK_WITH(DistBackendError, !line.empty(), "fog: between_hosts='tcp': the system forbids to listen at a TCP port");
  return line;
}

std::unique_ptr<ReachProbe> Meeting::probe_next_host() {
  if (!names_differ()) {
    const auto told = rendezvous_->allgather("listener", listen());
    for (size_t rank = 0; rank < places_.size(); ++rank) {
      places_[rank].listener = told[rank];
    }
  }
  std::vector<size_t> firsts; // the first rank of each host
  std::set<std::string> hosts;
  for (size_t rank = 0; rank < places_.size(); ++rank) {
    if (hosts.insert(places_[rank].host).second) {
      firsts.push_back(rank);
    }
  }
  const auto mine = std::find(firsts.begin(), firsts.end(), static_cast<size_t>(rendezvous_->rank()));
  if (mine == firsts.end()) {
    return nullptr;
  }
  const auto next = mine + 1 == firsts.end() ? firsts.begin() : mine + 1;
  return std::make_unique<ReachProbe>(places_[*next].listener);
}

void Meeting::watch_other_hosts(const ReachProbe* probe) {
  const auto& runtime = Runtime::instance();
  const auto reached = rendezvous_->allgather("reached", probe != nullptr ? probe->reached(Clock::now() + kProbeLimit) : "");
  std::map<int, std::string> others;
  for (size_t member = 0; member < places_.size(); ++member) {
    if (places_[member].host != places_[rendezvous_->rank()].host) {
      others.emplace(ranks_[member].world_rank, places_[member].listener);
    }
  }
  process_engine().with_lock([&] { process_monitor()->meet(runtime.rank(), runtime.size(), std::move(others), reached); });
}

std::shared_ptr<NetworkSums> Meeting::network_sums(const std::string& name) {
  if (ranks_[0].reduce != name_of(SumsBy::kMpi) || ranks_.size() == 1) {
    return nullptr;
  }
  const bool linked = std::all_of(ranks_.begin(), ranks_.end(), [](const Introduction& rank) { return rank.links; });
  const bool used = Runtime::instance().started() && (has_several_hosts() || !linked);
  if (rendezvous_->rank() == 0) {
    LOG(INFO) << "fog: group '" << name << "': "
              << (used ? "MPI does allreduce, reduce and reduce_scatter" : "reduce=\"mpi\" changes nothing, as all ranks share a host");
  }
  if (!used) {
    return nullptr;
  }
  std::vector<mpi::Reductions::Member> members;
  for (size_t member = 0; member < ranks_.size(); ++member) {
    const auto& rank = ranks_[member];
    members.push_back(
        {rank.world_rank, c10::str("rank ", member, " of group '", name, "' (pid ", rank.pid, " on host ", rank.host_name, ")")});
  }
  // MPI's call holds the engine's lock, so it must not wait for ranks that have not come yet
  rendezvous_->barrier("sums");
  return process_engine().with_lock([&] {
    for (const auto& rank : ranks_) { // MPI may send to any of them
      process_monitor()->begin(rank.world_rank);
    }
    return process_transport()->reductions().among(std::move(members), id(), deadline_after(timeout_));
  });
}

std::vector<Member> Meeting::members() const {
  std::vector<std::string> hosts;
  for (const auto& place : places_) {
    hosts.push_back(place.host);
  }
  const auto numbers = number_hosts(hosts);
  std::vector<Member> members;
  for (size_t member = 0; member < ranks_.size(); ++member) {
    const auto& rank = ranks_[member];
    members.push_back({rank.world_rank, rank.pid, numbers[member], places_[member].host, rank.host_name});
  }
  return members;
}

std::vector<std::string> Meeting::addresses() const {
  std::vector<std::string> addresses;
  for (const auto& place : places_) {
    addresses.push_back(place.address);
  }
  return addresses;
}

} // namespace fog
