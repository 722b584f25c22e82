#include "collectives/monitored_barrier.hpp"

namespace fog {
namespace {

constexpr uint16_t kHere = 0;
constexpr uint16_t kGo = 1;

Signature monitored_barrier_signature() {
  Signature signature;
  signature.kind = OpKind::kMonitoredBarrier;
  return signature;
}

} // namespace

MonitoredBarrier::MonitoredBarrier() : Operation(monitored_barrier_signature()) {}

void MonitoredBarrier::launch() {
  if (rank() != 0) {
    receive(0, kHere, nullptr, 0);
    receive(0, kGo, nullptr, 0);
    send(0, kHere, nullptr, 0);
    return;
  }
  for (int peer = 1; peer < size(); ++peer) {
    receive(peer, kHere, nullptr, 0);
    send(peer, kHere, nullptr, 0);
  }
}

Operation::Action MonitoredBarrier::advance() {
  if (!received(kHere)) {
    return Action::kWait;
  }
  if (rank() != 0) {
    return received(kGo) ? Action::kDone : Action::kWait;
  }
  if (!released_) {
    released_ = true;
    for (int peer = 1; peer < size(); ++peer) {
      send(peer, kGo, nullptr, 0);
    }
  }
  return Action::kDone;
}

} // namespace fog
