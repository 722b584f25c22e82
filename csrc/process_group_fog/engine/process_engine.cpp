#include "engine/process_engine.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <sstream>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "core/failure.hpp"
#include "core/timeline.hpp"
#include "core/whole_seconds.hpp"
#include "engine/long_wait.hpp"
#include "job/between_hosts.hpp"
#include "job/hosts.hpp"
#include "job/introduction.hpp"
#include "job/mpi_runtime.hpp"
#include "job/network_interface.hpp"
#include "job/rendezvous.hpp"
#include "transport/process_transport.hpp"
#include "transport/shared_memory/arena.hpp"
#include "transport/shared_memory/links.hpp"
#include "transport/tcp/connections.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

// How long the first rank of a host waits for the probe of the next host, which runs beside other work.
constexpr auto kProbeLimit = std::chrono::milliseconds(250);

// The engine's transport; null before the first group of several ranks.
std::atomic<ProcessTransport*> transport{nullptr};
// The monitor and the TCP connections of the transport, or of the transport that is being created.
std::atomic<PeerMonitor*> monitor{nullptr};
std::atomic<tcp::Connections*> connections{nullptr};

// The second message of a rank, after it knows the others' introductions; its text has a line for each member.
struct Place {
  std::string host;
  bool linked = false; // the rank shares memory with all others
  std::string address; // as in Introduction, with its arena
  std::string listener; // address for connections of other hosts' ranks, if the host names show that there are any
  std::string tcp; // address for messages over TCP, if the job uses that
};

std::string to_text(const Place& place) {
  return place.host + '\n' + (place.linked ? '1' : '0') + '\n' + place.address + '\n' + place.tcp + '\n' + place.listener + '\n';
}

Place read_place(const std::string& text) {
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

// The creation of a group.
class Meeting {
 public:
  Meeting(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout, Rendezvous::Gone gone)
      : rendezvous_(std::make_shared<Rendezvous>(store, rank, size, timeout, std::move(gone))), timeout_(timeout) {}

  ~Meeting() {
    if (monitor_) { // no transport was created
      monitor = nullptr;
      connections = nullptr;
    }
  }

  // Exchanges the ranks' introductions. The first groups also create the world.
  void meet(const std::string& name, SumsBy sums);
  // MPI's own sums; null unless all ranks want them, MPI runs, and some ranks are not reached through shared memory.
  std::shared_ptr<NetworkSums> network_sums(const std::string& name);

  uint64_t id() const {
    return ranks_[0].random;
  }
  std::vector<Member> members() const;
  std::vector<std::string> addresses() const;
  // Call when no rank needs the exchanged data any more.
  void finish() {
    rendezvous_->finish();
  }

 private:
  void check_one_world(const std::string& name) const;
  // The second step, if the hosts are not known yet: the ranks find out which of them share a host.
  void find_places();
  // Creates the transport, and starts MPI if not all ranks share memory.
  void make_transport();
  // The third step, if the world has several hosts: the first rank of each says whether it reaches the next host.
  void watch_other_hosts(const ReachProbe* probe);
  std::unique_ptr<ReachProbe> probe_next_host();
  std::string listen();
  // The same for messages over TCP; empty if the job does not use that.
  std::string listen_for_messages();
  // Returns whether all ranks of the world take part.
  bool is_world() const {
    return !Runtime::instance().joined() || Runtime::instance().size() == rendezvous_->size();
  }
  // Returns whether the names tell the hosts apart. Only clones of a virtual machine have equal names.
  bool names_differ() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [&](const Introduction& rank) { return rank.host_id != ranks_[0].host_id; });
  }
  bool is_new_world() const;
  bool has_several_hosts() const {
    return std::any_of(places_.begin(), places_.end(), [&](const Place& place) { return place.host != places_[0].host; });
  }

  const std::shared_ptr<Rendezvous> rendezvous_;
  const std::chrono::milliseconds timeout_;
  const Beacon beacon_; // until all ranks have looked for it
  std::unique_ptr<shared_memory::Links> links_; // for the transport to be created
  std::unique_ptr<PeerMonitor> monitor_; // for the transport to be created
  std::unique_ptr<tcp::Connections> connections_; // for the transport to be created
  std::vector<Introduction> ranks_;
  std::vector<Place> places_;
};

void Meeting::meet(const std::string& name, SumsBy sums) {
  const auto& runtime = Runtime::instance();
  const bool joined = runtime.joined();
  auto mine = introduce();
  mine.reduce = name_of(sums);
  mine.beacon = beacon_.name();
  mine.launched = Runtime::launched(rendezvous_->rank(), rendezvous_->size());
  mine.job = runtime.job();
  mine.host = runtime.host();
  if (auto* made = transport.load()) {
    mine.address = made->address();
  } else {
    links_ = std::make_unique<shared_memory::Links>(
        joined ? runtime.rank() : rendezvous_->rank(), joined ? runtime.size() : rendezvous_->size(), has_local_links());
    mine.address = links_->address(false);
    monitor_ = std::make_unique<PeerMonitor>();
    monitor = monitor_.get();
    connections_ = std::make_unique<tcp::Connections>();
    connections = connections_.get();
  }
  mine.world_rank = joined ? runtime.rank() : rendezvous_->rank();
  for (const auto& text : rendezvous_->allgather("rank", to_text(mine))) {
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

// Returns whether all ranks of the world create their first group, so that all have the same knowledge of each other.
bool Meeting::is_new_world() const {
  return is_world() && std::all_of(ranks_.begin(), ranks_.end(), [](const Introduction& rank) { return rank.host.empty(); });
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
  shared_memory::Arena::expect_ranks(static_cast<int>(local.size()));
  Place mine{find_host(ranks_, rank), false, ranks_[rank].address, is_world() && names_differ() ? listen() : "", ""};
  mine.tcp = listen_for_messages();
  if (links_) {
    if (!is_new_world()) { // other ranks of the world may come later
      local.resize(static_cast<size_t>(Runtime::instance().size()));
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
        connections.load()->add(ranks_[member].world_rank, places_[member].tcp);
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
    runtime.join(job, rank, size);
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
  return process_engine().with_lock([&] { return monitor.load()->listen(own); });
}

std::string Meeting::listen_for_messages() {
  if (between_hosts() != BetweenHosts::kTcp) {
    return "";
  }
  const auto own = addresses_towards(rendezvous_->store_host());
  const auto line = process_engine().with_lock([&] { return connections.load()->listen(own); });
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
  process_engine().with_lock([&] { monitor.load()->meet(runtime.rank(), runtime.size(), std::move(others), reached); });
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
      monitor.load()->begin(rank.world_rank);
    }
    return transport.load()->reductions().among(std::move(members), id(), deadline_after(timeout_));
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

// Suspends the judgement on this process's program.
class Suspended {
 public:
  explicit Suspended(Engine& engine) : engine_(engine) {
    engine_.suspend_judgement(true);
  }
  ~Suspended() {
    engine_.suspend_judgement(false);
  }
  Suspended(const Suspended&) = delete;
  Suspended& operator=(const Suspended&) = delete;

 private:
  Engine& engine_;
};

} // namespace

ProcessTransport* process_transport() {
  return transport.load();
}

void make_process_transport(
    std::unique_ptr<PeerMonitor> its_monitor,
    std::unique_ptr<shared_memory::Links> links,
    std::unique_ptr<tcp::Connections> its_connections,
    std::unique_ptr<mpi::RemoteMemory> remote_memory) {
  auto& engine = process_engine();
  monitor = its_monitor.get();
  connections = its_connections.get();
  auto made = std::make_unique<ProcessTransport>(
      Runtime::instance(), engine, engine.watchdog(), std::move(its_monitor), std::move(links), std::move(its_connections),
      std::move(remote_memory));
  transport = made.get();
  engine.use(std::move(made));
}

void observe_as(int rank, int size) {
  static std::once_flag once;
  std::call_once(once, [&] {
    process_engine().record_to(std::make_unique<FlightRecord>(rank, size, host_name()));
    for (const char* variable : {"FOG_TIMELINE", "BLUEFOG_TIMELINE"}) {
      const char* prefix = std::getenv(variable);
      if (prefix != nullptr && *prefix != '\0') {
        start_timeline(prefix, rank, size);
        return;
      }
    }
  });
}

void start_timeline(const std::string& prefix, int rank, int size) {
  Timeline::instance().start(prefix, rank, size, host_name());
  process_engine().observe(true);
}

void stop_timeline() {
  if (Timeline::instance().stop()) {
    process_engine().observe(false);
  }
}

Engine& process_engine() {
  static Engine* engine = [] {
    // A forked child has the parent's memory but not its threads, and MPI must not be used from both.
    pthread_atfork(nullptr, nullptr, [] {
      process_engine().set_forked();
      Timeline::forget_in_child();
      if (auto* inherited = monitor.load()) {
        inherited->close_all();
      }
      if (auto* inherited = connections.load()) {
        inherited->close_all();
      }
    });
    return new Engine();
  }();
  return *engine;
}

void read_settings() {
  auto& engine = process_engine();
  engine.check_not_forked();
  PeerMonitor::host_timeout(); // these throw if an environment variable is invalid
  check_interface();
  rma_bytes();
  long_wait();
  static std::once_flag once;
  std::call_once(once, [&] { engine.set_lost_after(whole_seconds("FOG_LOST_AFTER", 0, 0, 1'000'000)); });
}

std::shared_ptr<Group> connect(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    std::chrono::milliseconds timeout,
    const std::string& name,
    SumsBy sums,
    const Acquaintance& known) {
  auto& engine = process_engine();
  read_settings();
  const Suspended suspended(engine); // other ranks may take long to come
  const auto& runtime = Runtime::instance();
  observe_as(runtime.joined() ? runtime.rank() : rank, runtime.joined() ? runtime.size() : size);
  if (size == 1 && !runtime.joined()) { // no peers, so no messages
    return engine.add_group(0, name, rank, {{0, static_cast<int>(getpid()), 0, host_id(), host_name()}}, {});
  }
  static std::mutex first; // two threads may create their first groups at the same time
  std::unique_lock<std::mutex> lock(first);
  if (transport.load() != nullptr) {
    lock.unlock();
  }
  runtime.check_first_start();
  engine.watchdog().check();
  Rendezvous::Gone gone;
  if (known.group) {
    gone = [known](const std::vector<int>& members) { return known.gone(members); };
  }
  Meeting meeting(store, rank, size, timeout, std::move(gone));
  engine.start_threads(timeout); // before meeting: other ranks learn from these threads if this rank fails meanwhile
  meeting.meet(name, sums);
  auto network_sums = meeting.network_sums(name);
  meeting.finish();
  auto group = engine.add_group(meeting.id(), name, rank, meeting.members(), meeting.addresses());
  group->sums = std::move(network_sums);
  return group;
}

void leave_job() {
  auto& engine = process_engine();
  if (engine.forked()) {
    return;
  }
  const auto healthy = engine.shutdown();
  stop_timeline();
  if (healthy) {
    Runtime::instance().finalize(*healthy);
  }
}

} // namespace fog
