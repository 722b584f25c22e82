#include "engine/liveness.hpp"

#include <algorithm>
#include <iomanip>
#include <sstream>

namespace fog {
namespace {

std::string seconds(Liveness::Nanoseconds time) {
  std::ostringstream text;
  text << std::setprecision(3) << std::chrono::duration<double>(time).count() << " s";
  return text.str();
}

} // namespace

void Liveness::watch(PeerId peer, Deadline end, bool program) {
  auto& each = peers_[peer];
  each.watched = std::max(each.watched, end);
  if (program) {
    each.program_watched = std::max(each.program_watched, end);
  }
}

std::vector<Liveness::Verdict> Liveness::judge(Deadline now, bool paused, const Read& read) {
  std::vector<Verdict> verdicts;
  const bool again = now - judged_ > kPause;
  judged_ = now;
  for (auto position = peers_.begin(); position != peers_.end();) {
    const PeerId peer_id = position->first;
    auto& peer = position->second;
    const auto signs = now < peer.watched ? read(peer_id) : std::nullopt;
    if (!signs) {
      position = peers_.erase(position);
      continue;
    }
    const bool restart = again || !peer.seen;
    if (restart || signs->beats != peer.beats) {
      peer.beat = now;
    }
    if (restart || paused || signs->calls != peer.calls || signs->excused || now >= peer.program_watched) {
      peer.call = now;
    }
    peer.seen = true;
    peer.beats = signs->beats;
    peer.calls = signs->calls;
    const auto limit = std::clamp<Nanoseconds>(signs->usual, number(), kMostTimes * number());
    const Nanoseconds stopped = now - peer.beat;
    const Nanoseconds hung = now - peer.call;
    peer.suspect = 2 * stopped >= number() || 2 * hung >= limit;
    if (lost_after_.count() > 0 && (stopped >= number() || hung >= limit)) {
      std::string how = stopped >= number()
          ? "was lost: its process shows no sign of life for " + seconds(stopped)
          : "was lost: its program made no call for " + seconds(hung) + " (usually it takes up to " + seconds(signs->usual) + ")";
      if (signs->oldest.count() > 0) {
        how += ", and its oldest operation is " + seconds(signs->oldest) + " old";
      }
      verdicts.push_back({peer_id, std::move(how)});
      position = peers_.erase(position);
      continue;
    }
    ++position;
  }
  return verdicts;
}

} // namespace fog
