#include "engine/process_engine.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <random>
#include <sstream>

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/StringUtil.h>

#include "core/failure.hpp"
#include "job/between_hosts.hpp"
#include "job/hosts.hpp"
#include "job/mpi_runtime.hpp"
#include "job/network_interface.hpp"
#include "job/rendezvous.hpp"
#include "transport/process_transport.hpp"
#include "transport/shared_memory/arena.hpp"

namespace fog {
namespace {

using Clock = std::chrono::steady_clock;

// How long a group waits for the connections that show the end of processes on other hosts; they may be made later.
constexpr auto kMonitorLimit = std::chrono::milliseconds(1000);

// The engine's, once there is one.
std::atomic<ProcessTransport*> transport{nullptr};

Member parse_member(const std::string& text, std::string* job, std::string* inbox) {
  std::istringstream lines(text);
  Member member;
  std::string number;
  std::getline(lines, *job);
  std::getline(lines, number);
  member.peer_id = std::stoi(number);
  std::getline(lines, number);
  member.pid = std::stoi(number);
  std::getline(lines, member.host_id);
  std::getline(lines, member.host_name);
  std::getline(lines, *inbox);
  return member;
}

void watch_other_hosts(Rendezvous& rendezvous, const std::vector<Member>& members, int rank, std::chrono::milliseconds timeout) {
  auto& engine = process_engine();
  auto& monitor = transport.load()->monitor();
  const auto addresses = addresses_towards(rendezvous.store_host());
  const auto mine = engine.with_lock([&] { return monitor.listen(addresses); });
  const auto& runtime = Runtime::instance();
  std::vector<std::string> texts;
  try {
    texts = rendezvous.allgather("monitor", mine);
  } catch (...) {
    engine.with_lock([&] { monitor.stop_listening(); });
    throw;
  }
  std::map<int, std::string> others;
  for (size_t member = 0; member < members.size(); ++member) {
    if (members[member].host != members[rank].host) {
      others.emplace(members[member].peer_id, texts[member]);
    }
  }
  const auto limit = Clock::now() + std::min<std::chrono::milliseconds>(timeout, kMonitorLimit);
  auto missing = engine.with_lock([&] {
    monitor.connect(runtime.rank(), runtime.size(), hash_more(kEmptyHash, runtime.job().data(), runtime.job().size()), others);
    return monitor.missing();
  });
  while (!missing.empty() && Clock::now() < limit) {
    monitor.wait(limit);
    engine.look_for_ended_peers();
    missing = engine.with_lock([&] { return monitor.missing(); });
  }
  if (!missing.empty()) {
    LOG(INFO) << "fog: world rank " << runtime.rank() << ": no connection yet that would show the end of world ranks "
              << c10::Join(", ", missing);
  }
}

} // namespace

Engine& process_engine() {
  static Engine* engine = [] {
    // A forked child has the parent's memory but not its threads, and MPI must not be used from both.
    pthread_atfork(nullptr, nullptr, [] {
      process_engine().set_forked();
      if (auto* inherited = transport.load()) {
        inherited->monitor().close_in_child();
      }
    });
    return new Engine();
  }();
  return *engine;
}

std::shared_ptr<Group> connect(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, std::chrono::milliseconds timeout, const std::string& name) {
  auto& engine = process_engine();
  engine.check_not_forked();
  PeerMonitor::host_timeout(); // these throw where the environment is wrong
  check_interface();
  rma_bytes();
  auto& runtime = Runtime::instance();
  std::vector<Member> members;
  std::vector<std::string> inboxes; // by member
  uint64_t id = 0;
  if (size == 1 && !runtime.started()) {
    // Nobody to talk to: no MPI, no messages.
    members.push_back({0, static_cast<int>(getpid()), 0, host_id(), host_name()});
  } else {
    Rendezvous rendezvous(store, rank, size, timeout);
    runtime.start(rendezvous, timeout);
    const auto host = runtime.host(rendezvous);
    shared_memory::Arena::expect_ranks(runtime.local_ranks());
    std::ostringstream mine;
    mine << runtime.job() << '\n' << runtime.rank() << '\n' << getpid() << '\n' << host << '\n' << host_name() << '\n';
    engine.watchdog().check();
    {
      static std::mutex making; // two threads may make their first groups at once
      const std::lock_guard<std::mutex> lock(making);
      if (transport.load() == nullptr) {
        std::unique_ptr<mpi::RemoteMemory> remote_memory;
        try {
          remote_memory = mpi::RemoteMemory::open(runtime, rendezvous, engine.watchdog(), timeout);
        } catch (const std::exception& error) {
          runtime.fail(message_of(error));
          throw;
        }
        auto made = std::make_unique<ProcessTransport>(runtime, engine, engine.watchdog(), std::move(remote_memory));
        transport = made.get();
        engine.use(std::move(made));
      }
      engine.start_threads(timeout); // now: the ranks that have not met yet learn that this one does not come
    }
    mine << transport.load()->address();
    std::vector<std::string> host_ids;
    int peer = 0;
    for (const auto& text : rendezvous.allgather("member", mine.str())) {
      std::string job;
      inboxes.emplace_back();
      members.push_back(parse_member(text, &job, &inboxes.back()));
      host_ids.push_back(members.back().host_id);
      TORCH_CHECK_WITH(
          DistBackendError, job == runtime.job(), "fog: rank ", peer, " of group '", name,
          "' belongs to another MPI world than this rank ", rank,
          ": the first fog group of each process fixes its world, and this group spans two of them. Make a fog group of all ranks first.");
      ++peer;
    }
    const auto hosts = number_hosts(host_ids);
    for (int member = 0; member < size; ++member) {
      members[member].host = hosts[member];
    }
    if (size == runtime.size() && std::any_of(hosts.begin(), hosts.end(), [](int host) { return host != 0; })) {
      watch_other_hosts(rendezvous, members, rank, timeout);
    }
    id = std::stoull(rendezvous.from_rank_zero("group", [] {
      std::random_device device;
      return std::to_string((static_cast<uint64_t>(device()) << 32) | device());
    }));
    rendezvous.finish();
  }
  return engine.add_group(id, name, rank, std::move(members), inboxes);
}

void leave_job() {
  auto& engine = process_engine();
  if (engine.forked()) {
    return;
  }
  if (const auto healthy = engine.shutdown()) {
    Runtime::instance().finalize(*healthy);
  }
}

} // namespace fog
