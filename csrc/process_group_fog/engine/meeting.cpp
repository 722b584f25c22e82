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
// The second message of a rank, after it knows what the others tell about themselves; its text has a line for each member.
struct Meeting::Place {
  std::string host;
  bool linked = false; // the rank shares memory with all others
  std::string address; // as in PeerInformation, with its arena
  std::string tcp; // address for messages over TCP, unless all ranks share a host
};

std::string Meeting::to_text(const Place& place) {
  return place.host + '\n' + (place.linked ? '1' : '0') + '\n' + place.address + '\n' + place.tcp + '\n';
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
  return place;
}

Meeting::Meeting(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout, Rendezvous::Gone gone)
    : rendezvous_(std::make_shared<Rendezvous>(store, rank, size, timeout, std::move(gone))), timeout_(timeout) {}

Meeting::~Meeting() {
  if (connections_) { // no transport was created
    use_sockets(nullptr);
    forget_job_secret();
  }
}

bool Meeting::is_world() const {
  return !Runtime::instance().joined() || Runtime::instance().size() == rendezvous_->size();
}

bool Meeting::has_several_hosts() const {
  return std::any_of(places_.begin(), places_.end(), [&](const Place& place) { return place.host != places_[0].host; });
}

void Meeting::meet(const std::string& name) {
  const auto& runtime = Runtime::instance();
  const bool joined = runtime.joined();
  auto mine = own_information();
  mine.beacon = beacon_.name();
  mine.job = runtime.job();
  mine.host = runtime.host();
  if (joined) {
    mine.max_ranks = runtime.max_ranks();
  }
  if (const auto* made = process_transport()) {
    mine.address = made->address();
  } else {
    links_ = std::make_unique<shared_memory::Links>(
        joined ? runtime.rank() : rendezvous_->rank(), joined ? runtime.size() : rendezvous_->size(), mine.max_ranks, mine.links);
    mine.address = links_->address(false);
    connections_ = std::make_unique<tcp::Connections>();
    use_sockets(connections_.get());
  }
  if (rendezvous_->is_in_file()) {
    mine.offered_secret.clear();
  }
  mine.world_rank = joined ? runtime.rank() : rendezvous_->rank();
  for (const auto& text : rendezvous_->allgather("rank", fog::to_text(mine))) {
    ranks_.push_back(read_peer_information(text));
  }
  check_alike(ranks_);
  check_one_world(name);
  settle_secret(ranks_);
  for (const auto& rank : ranks_) {
    places_.push_back({rank.host, false, rank.address, ""});
  }
  if (std::all_of(ranks_.begin(), ranks_.end(), [](const PeerInformation& rank) { return !rank.host.empty(); })) {
    return;
  }
  find_places();
  check_secret();
  if (links_) {
    make_transport();
  }
}

void Meeting::check_one_world(const std::string& name) const {
  const int rank = rendezvous_->rank();
  for (size_t peer = 0; peer < ranks_.size(); ++peer) {
    TORCH_CHECK_WITH(
        DistBackendError, ranks_[peer].job == ranks_[rank].job, "fog: rank ", peer, " of group '", name,
        "' belongs to another world than this rank ", rank,
        ": the first fog group of each process fixes its world, and this group spans two of them. Make a fog group of all ranks first.");
  }
}

// Ranks that reach each other by fog's own connections have to prove that they know a secret.
void Meeting::check_secret() const {
  TORCH_CHECK_WITH(
      DistBackendError, !job_secret().empty() || all_linked(),
      "fog: these ranks need a secret to connect with each other, and none is passed through a store that is a file: set "
      "FOG_JOB_SECRET to the same text of at least 16 characters on all ranks");
}

// Returns whether all ranks of the world create their first group, so that all have the same knowledge of each other.
bool Meeting::is_new_world() const {
  return is_world() && std::all_of(ranks_.begin(), ranks_.end(), [](const PeerInformation& rank) { return rank.host.empty(); });
}

void Meeting::find_places() {
  auto& engine = process_engine();
  const int rank = rendezvous_->rank();
  std::vector<int> local; // ranks of this host, according to the names
  for (size_t peer = 0; peer < ranks_.size(); ++peer) {
    if (ranks_[peer].host_id == ranks_[rank].host_id) {
      local.push_back(ranks_[peer].world_rank);
    }
  }
  const bool alone = is_new_world() && local.size() == ranks_.size(); // according to the names
  if (links_ && alone) { // places for ranks that join
    for (int later = rendezvous_->size(); later < ranks_[rank].max_ranks; ++later) {
      local.push_back(later);
    }
  }
  shared_memory::Arena::expect_ranks(static_cast<int>(local.size()));
  Place mine{find_host(ranks_, rank), false, ranks_[rank].address, ""};
  if (!alone || std::any_of(ranks_.begin(), ranks_.end(), [](const PeerInformation& each) { return !each.links; })) {
    mine.tcp = listen();
  }
  if (links_) {
    if (!alone) { // other ranks of the world may come later, or another process in the place of one
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
  const bool told = std::any_of(places_.begin(), places_.end(), [](const Place& place) { return !place.tcp.empty(); });
  if (!all_linked() && !told) { // as the names did not show
    const auto listeners = rendezvous_->allgather("tcp", listen());
    for (size_t peer = 0; peer < places_.size(); ++peer) {
      places_[peer].tcp = listeners[peer];
    }
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

bool Meeting::all_linked() const {
  return !has_several_hosts() && std::all_of(places_.begin(), places_.end(), [](const Place& place) { return place.linked; });
}

bool Meeting::wants_rma() const {
  if (between_hosts() != BetweenHosts::kAuto || !has_several_hosts()) {
    return between_hosts() == BetweenHosts::kRma && !all_linked();
  }
  const auto without = std::find_if(ranks_.begin(), ranks_.end(), [](const PeerInformation& each) { return each.fabric.empty(); });
  const bool may_be_there = without == ranks_.end();
  if (rendezvous_->rank() == 0 && !may_be_there) {
    LOG(INFO) << "fog: between hosts data goes by TCP: MPI is not started, as nothing tells of a fabric for RMA on host "
              << without->host_name;
  }
  return may_be_there;
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
  bool uses_mpi = wants_rma(); // otherwise it is not started, which takes longer than everything else
  if (uses_mpi) {
    engine.watchdog().start();
    if (const auto failure = runtime.start(rendezvous_, job, timeout_); !failure.empty()) {
      uses_mpi = false;
      if (between_hosts() == BetweenHosts::kRma) {
        runtime.fail(failure);
        C10_THROW_ERROR(DistBackendError, "fog: " + failure + ". With FOG_BETWEEN_HOSTS=tcp the job does without MPI");
      }
      if (rank == 0) {
        LOG(WARNING) << "fog: between hosts data goes by TCP: there may be a fabric for RMA (" << ranks_[0].fabric
                     << "), but MPI did not start: " << failure;
      }
    }
  }
  if (!runtime.joined()) {
    runtime.join(job, rank, size, ranks_[rank].max_ranks);
  }
  std::unique_ptr<mpi::RemoteMemory> remote_memory;
  if (uses_mpi) {
    try {
      remote_memory = mpi::RemoteMemory::open(runtime, *rendezvous_, engine.watchdog(), timeout_);
    } catch (const std::exception& error) {
      runtime.fail(message_of(error));
      throw;
    }
  }
  make_process_transport(std::move(links_), std::move(connections_), std::move(remote_memory));
}

std::string Meeting::listen() {
  if (job_secret().empty()) {
    return "";
  }
  const auto own = addresses_towards(rendezvous_->store_host());
  const auto line = process_engine().with_lock([&] { return process_connections()->listen(own); });
  TORCH_CHECK_WITH(DistBackendError, !line.empty(), "fog: the system forbids to listen at a TCP port");
  return line;
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
