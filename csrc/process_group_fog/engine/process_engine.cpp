#include "engine/process_engine.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>

#include "core/settings.hpp"
#include "core/timeline.hpp"
#include "engine/group_setup.hpp"
#include "job/hosts.hpp"
#include "job/mpi_runtime.hpp"
#include "job/network_interface.hpp"
#include "transport/process_transport.hpp"
#include "transport/shared_memory/links.hpp"
#include "transport/tcp/connections.hpp"

namespace fog {
namespace {

// The engine's transport; null before the first group of several ranks.
std::atomic<ProcessTransport*> transport{nullptr};
// The TCP connections of the transport, or of the transport that is being created.
std::atomic<tcp::Connections*> connections{nullptr};

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

// Returns how those of these members of the new group are called whose processes have ended, or that were declared lost.
// From now on the ends of all of them are noticed.
std::map<int, std::string> gone_members(const PriorGroup& prior, const std::vector<int>& members) {
  auto& engine = process_engine();
  std::vector<int> asked;
  for (const int member : members) {
    asked.push_back(prior.ranks.at(static_cast<size_t>(member)));
  }
  engine.watch(*prior.group, asked);
  engine.look_for_ended_peers();
  std::map<int, std::string> gone;
  for (size_t i = 0; i < members.size(); ++i) {
    if (!engine.peer(prior.group->members[asked[i]].peer_id).is_alive()) { // one that has only closed that group may come
      gone.emplace(members[i], prior.group->describe_member(asked[i]) + " of group '" + prior.group->name + "'");
    }
  }
  return gone;
}

} // namespace

ProcessTransport* process_transport() {
  return transport.load();
}

tcp::Connections* process_connections() {
  return connections.load();
}

void use_sockets(tcp::Connections* its_connections) {
  connections = its_connections;
}

void make_process_transport(
    std::unique_ptr<shared_memory::Links> links,
    std::unique_ptr<tcp::Connections> its_connections,
    std::unique_ptr<mpi::RemoteMemory> remote_memory) {
  auto& engine = process_engine();
  use_sockets(its_connections.get());
  auto made = std::make_unique<ProcessTransport>(
      Runtime::instance().rank(), engine, std::move(links), std::move(its_connections), std::move(remote_memory));
  transport = made.get();
  engine.use(std::move(made));
}

void observe_as(int rank, int size, const std::string& script) {
  static std::once_flag once;
  std::call_once(once, [&] {
    process_engine().record_to(std::make_unique<FlightRecord>(rank, size, host_name(), script));
    if (const auto prefix = settings().timeline; !prefix.empty()) {
      start_timeline(prefix, rank, size);
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
      if (process_engine().forked()) { // this child's parent has closed the sockets, whose numbers may be other files now
        return;
      }
      process_engine().set_forked();
      Timeline::forget_in_child();
      FlightRecord::forget_in_child();
      if (auto* inherited = connections.load()) {
        inherited->close_all();
      }
    });
    return new Engine();
  }();
  return *engine;
}

void use_settings() {
  auto& engine = process_engine();
  engine.check_not_forked();
  check_interface();
  static std::once_flag once;
  std::call_once(once, [&] { engine.set_lost_after(std::chrono::seconds(settings().lost_after)); });
}

std::shared_ptr<Group> connect(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    std::chrono::milliseconds timeout,
    const std::string& name,
    const PriorGroup& prior) {
  auto& engine = process_engine();
  use_settings();
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
  if (prior.group) {
    gone = [prior](const std::vector<int>& members) { return gone_members(prior, members); };
  }
  GroupSetup setup(store, rank, size, timeout, std::move(gone));
  engine.start_threads(timeout); // before the exchange: other ranks learn from these threads if this rank fails meanwhile
  setup.exchange(name);
  setup.finish();
  return engine.add_group(setup.id(), name, rank, setup.members(), setup.addresses());
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
