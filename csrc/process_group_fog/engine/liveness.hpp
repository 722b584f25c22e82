// The judgement on peers from which nothing comes: suspect, then lost.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/deadline.hpp"
#include "core/pulse.hpp"
#include "transport/transport.hpp"

namespace fog {

// Observes the signs of life of peers while somebody watches them. All times follow from one number, `lost_after`:
//
// - A process whose engine does not go on for `lost_after` is stopped, or cut off.
// - A program that makes no call for `lost_after` hangs, unless it usually takes longer between two calls: then the
//   limit is that time (CallGaps), at most ten times `lost_after`. A program that waits in fog itself, or has suspended
//   the judgement, is excused.
//
// Half of these times makes a suspect. Silence counts only while it is watched, and starts again after a time in which
// this process was stopped itself; that of a program also after a pause of this process's own program. Every call needs
// the engine's lock.
class Liveness {
 public:
  using Nanoseconds = std::chrono::nanoseconds;
  struct Verdict {
    PeerId peer;
    std::string how; // "was lost: ..."
  };
  using Read = std::function<std::optional<Signs>(PeerId peer)>;

  // 0: nobody is declared lost, and the suspicion uses kSuspicion.
  void set_lost_after(Nanoseconds lost_after) {
    lost_after_ = lost_after;
  }
  Nanoseconds lost_after() const {
    return lost_after_;
  }
  // The number by which times are judged.
  Nanoseconds number() const {
    return lost_after_.count() > 0 ? lost_after_ : Nanoseconds(kSuspicion);
  }

  // Somebody waits for that peer until `end`. With `program`, it is wrong if the peer's program makes no calls.
  void watch(PeerId peer, Deadline end, bool program);
  bool watches_any() const {
    return !peers_.empty();
  }
  // The peer takes no further part.
  void forget(PeerId peer) {
    peers_.erase(peer);
  }

  // Reads the signs of the watched peers. Returns those that are lost, each once. `paused`: this process's own program
  // pauses too, so no other program is late.
  std::vector<Verdict> judge(Deadline now, bool paused, const Read& read);
  bool suspects(PeerId peer) const {
    const auto found = peers_.find(peer);
    return found != peers_.end() && found->second.suspect;
  }

 private:
  static constexpr auto kSuspicion = std::chrono::seconds(30);
  static constexpr int kMostTimes = 10; // the longest limit, as a multiple of the number
  // A longer pause between two judgements means that this process was stopped or had no core.
  static constexpr auto kPause = std::chrono::milliseconds(500);

  struct Peer {
    Deadline watched; // until then
    Deadline program_watched;
    bool seen = false;
    uint64_t beats = 0;
    uint64_t calls = 0;
    Deadline beat; // when `beats` changed last, or was first seen
    Deadline call;
    bool suspect = false;
  };

  Nanoseconds lost_after_{0};
  Deadline judged_{};
  std::unordered_map<PeerId, Peer> peers_;
};

} // namespace fog
