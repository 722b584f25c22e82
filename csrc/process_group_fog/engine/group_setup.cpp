#include "engine/group_setup.hpp"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "core/failure.hpp"
#include "core/settings.hpp"
#include "engine/process_engine.hpp"
#include "job/mpi_runtime.hpp"
#include "job/network_interface.hpp"
#include "job/secret.hpp"
#include "transport/process_transport.hpp"
#include "transport/shared_memory/arena.hpp"

namespace fog {

GroupSetup::GroupSetup(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout, Rendezvous::Gone gone)
    : rendezvous_(std::make_shared<Rendezvous>(store, rank, size, timeout, std::move(gone))), timeout_(timeout) {}

GroupSetup::~GroupSetup() {
  if (connections_) { // no transport was created
    use_sockets(nullptr);
    forget_job_secret();
  }
}

bool GroupSetup::is_world() const {
  return !Runtime::instance().joined() || Runtime::instance().size() == rendezvous_->size();
}

bool GroupSetup::has_several_hosts() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [&](const PeerInformation& rank) { return rank.host != ranks_[0].host; });
}

void GroupSetup::exchange(const std::string& name) {
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
  if (std::all_of(ranks_.begin(), ranks_.end(), [](const PeerInformation& rank) { return !rank.host.empty(); })) {
    return;
  }
  find_hosts();
  check_secret();
  if (links_) {
    make_transport();
  }
}

void GroupSetup::check_one_world(const std::string& name) const {
  const int rank = rendezvous_->rank();
  for (size_t peer = 0; peer < ranks_.size(); ++peer) {
    TORCH_CHECK_WITH(
        DistBackendError, ranks_[peer].job == ranks_[rank].job, "fog: rank ", peer, " of group '", name,
        "' belongs to another world than this rank ", rank,
        ": the first fog group of each process fixes its world, and this group spans two of them. Make a fog group of all ranks first.");
  }
}

// Ranks that reach each other by fog's own connections have to prove that they know a secret.
void GroupSetup::check_secret() const {
  TORCH_CHECK_WITH(
      DistBackendError, !job_secret().empty() || all_linked(),
      "fog: these ranks need a secret to connect with each other, and none is passed through a store that is a file: set "
      "FOG_JOB_SECRET to the same text of at least 16 characters on all ranks");
}

// Returns whether all ranks of the world create their first group, so that all have the same knowledge of each other.
bool GroupSetup::is_new_world() const {
  return is_world() && std::all_of(ranks_.begin(), ranks_.end(), [](const PeerInformation& rank) { return rank.host.empty(); });
}

void GroupSetup::find_hosts() {
  const int rank = rendezvous_->rank();
  const int size = rendezvous_->size();
  const auto near = [&](const PeerInformation& peer) { return peer.host_id == ranks_[rank].host_id; }; // according to the names
  auto local = static_cast<int>(std::count_if(ranks_.begin(), ranks_.end(), near));
  const bool alone = is_new_world() && local == size;
  if (links_ && alone) { // places for ranks that join
    local = std::max(local, ranks_[rank].max_ranks);
  }
  shared_memory::Arena::expect_ranks(local);
  auto mine = ranks_[rank];
  mine.host = find_host(ranks_, rank);
  if (!alone || std::any_of(ranks_.begin(), ranks_.end(), [](const PeerInformation& each) { return !each.links; })) {
    mine.tcp = listen();
  }
  if (links_) {
    const auto& runtime = Runtime::instance();
    // If not alone: other ranks of the world may come later, or another process in the place of one.
    links_->settle(alone ? local : runtime.joined() ? runtime.size() : size);
    int reached = 1;
    for (const auto& peer : ranks_) {
      if (peer.world_rank != mine.world_rank && near(peer)) {
        links_->attach(peer.world_rank, peer.address);
        reached += links_->reaches(peer.world_rank) ? 1 : 0;
      }
    }
    mine.shares_memory = is_new_world() && reached == size;
    mine.address = links_->address(true);
  }
  const auto told = rendezvous_->allgather("host", to_text(mine));
  for (int member = 0; member < size; ++member) {
    ranks_[member] = read_peer_information(told[member]);
  }
  const bool listens = std::any_of(ranks_.begin(), ranks_.end(), [](const PeerInformation& each) { return !each.tcp.empty(); });
  if (!all_linked() && !listens) { // as the names did not show
    const auto listeners = rendezvous_->allgather("tcp", listen());
    for (int member = 0; member < size; ++member) {
      ranks_[member].tcp = listeners[member];
    }
  }
  process_engine().with_lock([&] {
    for (const auto& peer : ranks_) {
      if (peer.world_rank != mine.world_rank && !peer.tcp.empty()) {
        process_connections()->add(peer.world_rank, peer.tcp);
      }
    }
  });
  for (const auto& peer : ranks_) {
    if (links_ && peer.host != mine.host) {
      links_->detach(peer.world_rank);
    }
  }
}

bool GroupSetup::all_linked() const {
  return !has_several_hosts() &&
      std::all_of(ranks_.begin(), ranks_.end(), [](const PeerInformation& each) { return each.shares_memory; });
}

bool GroupSetup::wants_rma() const {
  if (const auto way = settings().between_hosts; way != "auto" || !has_several_hosts()) {
    return way == "rma" && !all_linked();
  }
  const auto without = std::find_if(ranks_.begin(), ranks_.end(), [](const PeerInformation& each) { return each.fabric.empty(); });
  const bool may_be_there = without == ranks_.end();
  if (rendezvous_->rank() == 0 && !may_be_there) {
    LOG(INFO) << "fog: between hosts data goes by TCP: MPI is not started, as nothing tells of a fabric for RMA on host "
              << without->host_name;
  }
  return may_be_there;
}

void GroupSetup::make_transport() {
  auto& runtime = Runtime::instance();
  auto& engine = process_engine();
  const int rank = rendezvous_->rank();
  const int size = rendezvous_->size();
  const auto job = runtime.joined() ? runtime.job() : c10::str("fog_", ranks_[0].pid, '_', ranks_[0].random);
  if (!runtime.joined() || size == runtime.size()) {
    runtime.settle(ranks_[rank].host, number_nodes(hosts(), ranks_));
  }
  bool uses_mpi = wants_rma(); // otherwise it is not started, which takes longer than everything else
  if (uses_mpi) {
    engine.watchdog().start();
    if (const auto failure = runtime.start(rendezvous_, job, timeout_); !failure.empty()) {
      uses_mpi = false;
      if (settings().between_hosts == "rma") {
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

std::string GroupSetup::listen() {
  if (job_secret().empty()) {
    return "";
  }
  const auto own = addresses_towards(rendezvous_->store_host());
  const auto line = process_engine().with_lock([&] { return process_connections()->listen(own); });
  TORCH_CHECK_WITH(DistBackendError, !line.empty(), "fog: the system forbids to listen at a TCP port");
  return line;
}

std::vector<std::string> GroupSetup::hosts() const {
  std::vector<std::string> hosts;
  for (const auto& rank : ranks_) {
    hosts.push_back(rank.host);
  }
  return hosts;
}

std::vector<Member> GroupSetup::members() const {
  const auto numbers = number_hosts(hosts());
  std::vector<Member> members;
  for (size_t member = 0; member < ranks_.size(); ++member) {
    const auto& rank = ranks_[member];
    members.push_back({rank.world_rank, rank.pid, numbers[member], rank.host, rank.host_name});
  }
  return members;
}

std::vector<std::string> GroupSetup::addresses() const {
  std::vector<std::string> addresses;
  for (const auto& rank : ranks_) {
    addresses.push_back(rank.address);
  }
  return addresses;
}

} // namespace fog
