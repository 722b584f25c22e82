#include "collectives/barrier.hpp"

namespace fog {

void Barrier::launch() {
  for (int distance = 1; distance < size(); distance <<= 1) {
    receive((rank() - distance % size() + size()) % size(), rounds_++, nullptr, 0);
  }
  send_round();
}

void Barrier::send_round() {
  if (round_ < rounds_) {
    send((rank() + (1 << round_)) % size(), round_, nullptr, 0);
  }
}

Operation::Action Barrier::advance() {
  while (round_ < rounds_ && received(round_)) {
    ++round_;
    send_round();
  }
  return round_ == rounds_ ? Action::kDone : Action::kWait;
}

} // namespace fog
