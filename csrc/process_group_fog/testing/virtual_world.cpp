#include "testing/virtual_world.hpp"

#include <unistd.h>

#include <numeric>

#include "engine/engine.hpp"
#include "job/mpi_runtime.hpp"
#include "job/secret.hpp"
#include "transport/process_transport.hpp"
#include "windows/window_service.hpp"

namespace fog {

struct VirtualWorld::Engines {
  std::shared_ptr<InProcessNetwork> network;
  std::vector<std::unique_ptr<Engine>> engines; // by rank
  std::vector<bool> lost;
};

VirtualWorld::VirtualWorld(const Options& options) : engines_(std::make_shared<Engines>()), has_threads_(!options.wire.empty()) {
  TORCH_CHECK_VALUE(options.size >= 1, "size: got ", options.size, "; allowed are numbers from 1 up");
  TORCH_CHECK_VALUE(options.ranks_per_host >= 1, "ranks_per_host: got ", options.ranks_per_host, "; allowed are numbers from 1 up");
  TORCH_CHECK_VALUE(
      options.hosts.empty() || options.hosts.size() == static_cast<size_t>(options.size), "hosts: got ", options.hosts.size(),
      " numbers; allowed is one for each of the ", options.size, " ranks");
  TORCH_CHECK_VALUE(
      options.wire.empty() || options.wire == "in process" || options.wire == "memory" || options.wire == "tcp", "wire: got '",
      options.wire, "'; allowed are 'in process', 'memory', 'tcp' and ''");
  engines_->network = std::make_shared<InProcessNetwork>(options.size, options.network);
  engines_->lost.resize(static_cast<size_t>(options.size), false);
  std::vector<Member> members;
  for (int rank = 0; rank < options.size; ++rank) {
    const int host = options.hosts.empty() ? rank / options.ranks_per_host : options.hosts[static_cast<size_t>(rank)];
    members.push_back({rank, static_cast<int>(getpid()), host, "virtual " + std::to_string(host), "host" + std::to_string(host)});
  }
  for (int rank = 0; rank < options.size; ++rank) {
    engines_->engines.push_back(std::make_unique<Engine>());
    engines_->engines.back()->serve(std::make_unique<WindowService>(*engines_->engines.back()));
  }
  const auto addresses = connect(options);
  for (int rank = 0; rank < options.size; ++rank) {
    const auto group_options = c10::make_intrusive<ProcessGroupFog::Options>(options.timeout);
    group_options->confirm = options.confirm;
    auto& engine = *engines_->engines[static_cast<size_t>(rank)];
    auto group = engine.add_group(1, "virtual", rank, members, addresses);
    groups_.push_back(c10::make_intrusive<ProcessGroupFog>(std::move(group), group_options, engines_));
    if (has_threads_) {
      engine.start_threads(options.timeout);
    }
  }
}

std::vector<std::string> VirtualWorld::connect(const Options& options) {
  std::vector<std::string> addresses(engines_->engines.size());
  if (options.wire.empty() || options.wire == "in process") {
    for (int rank = 0; rank < options.size; ++rank) {
      auto& engine = *engines_->engines[static_cast<size_t>(rank)];
      engine.use(engines_->network->connect(rank, engine));
    }
    return addresses;
  }
  set_job_secret(random_secret());
  std::vector<int> all(addresses.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::string> listeners(addresses.size());
  std::vector<std::unique_ptr<shared_memory::Links>> links;
  std::vector<std::unique_ptr<tcp::Connections>> connections;
  for (const int rank : all) {
    links.push_back(std::make_unique<shared_memory::Links>(rank, options.size, options.size, options.wire == "memory"));
    links.back()->settle(options.size);
    addresses[rank] = links.back()->address(true);
    connections.push_back(std::make_unique<tcp::Connections>());
    listeners[rank] = options.wire == "tcp" ? connections.back()->listen({}) : "";
  }
  for (const int rank : all) {
    for (const int other : all) {
      if (other != rank && !listeners[other].empty()) {
        connections[rank]->add(other, listeners[other]);
      }
    }
    auto& engine = *engines_->engines[rank];
    engine.use(std::make_unique<ProcessTransport>(rank, engine, std::move(links[rank]), std::move(connections[rank]), nullptr));
  }
  return addresses;
}

void VirtualWorld::close() {
  if (has_threads_) { // without them, nobody would answer the goodbyes
    for (const auto& engine : engines_->engines) {
      engine->shutdown();
    }
  }
}

void VirtualWorld::progress() {
  bool moved = true;
  while (moved || engines_->network->in_flight() > 0) {
    moved = false;
    for (size_t rank = 0; rank < engines_->engines.size(); ++rank) {
      moved = (!engines_->lost[rank] && engines_->engines[rank]->progress()) || moved;
    }
  }
}

InProcessNetwork::Counts VirtualWorld::counts() const {
  return engines_->network->counts();
}

void VirtualWorld::lose(int rank, bool noticed) {
  TORCH_CHECK_VALUE(
      rank >= 0 && rank < static_cast<int>(engines_->lost.size()), "rank: got ", rank, "; allowed are ranks 0 to ",
      engines_->lost.size() - 1);
  engines_->lost[static_cast<size_t>(rank)] = true;
  engines_->network->lose(rank, noticed);
  for (size_t other = 0; noticed && other < engines_->engines.size(); ++other) {
    if (!engines_->lost[other]) {
      engines_->engines[other]->look_for_ended_peers();
    }
  }
}

} // namespace fog
