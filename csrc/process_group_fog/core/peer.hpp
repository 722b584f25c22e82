// What a process knows about the end of the other processes of its job.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>

namespace fog {

// A process of the job. It has the same number in all processes as long as it lives. Processes that started together
// are numbered by their ranks in the job; a process that joins later gets a new number.
using PeerId = int;

struct Peer {
  enum class State : uint8_t {
    kAlive, // as far as is known; whether it can be reached is the transport's to say
    kLeft, // it has said goodbye: it reads what has arrived, but its memory may disappear at any time
    kSilent, // it counts as lost, but its process may still run and write to this process's memory
    kLost, // its process has ended without a goodbye
  };
  bool is_alive() const {
    return state == State::kAlive;
  }
  bool is_silent() const {
    return state == State::kSilent;
  }
  bool is_lost() const {
    return is_silent() || state == State::kLost;
  }

  State state = State::kAlive;
};

// All peers of a process, by world rank.
class Peers {
 public:
  Peer operator[](int peer) const {
    const auto found = peers_.find(peer);
    return found == peers_.end() ? Peer() : found->second;
  }
  bool any_lost() const {
    return std::any_of(peers_.begin(), peers_.end(), [](const auto& each) { return each.second.is_lost(); });
  }
  // Gives a peer that state if its present one allows it; returns whether it does. A process ends in one way only, but the
  // end of one that is silent may be seen later. Only one that has ended is replaced by another, which is alive.
  bool become(int peer, Peer::State next) {
    auto& its = peers_[peer];
    const auto after_the_end = its.is_silent() ? Peer::State::kLost : Peer::State::kAlive;
    const bool allowed = its.is_alive() ? next != Peer::State::kAlive : next == after_the_end;
    its.state = allowed ? next : its.state;
    if (its.is_alive()) {
      peers_.erase(peer);
    }
    return allowed;
  }

 private:
  std::unordered_map<int, Peer> peers_; // those that are not alive
};

} // namespace fog
