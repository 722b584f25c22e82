#include "collectives/point_to_point.hpp"

namespace fog {

PointToPointSend::PointToPointSend(Signature signature, int peer, int tag, const void* data, size_t bytes)
    : PointToPoint(signature, tag), peer_(peer), data_(data), bytes_(bytes) {}

void PointToPointSend::launch() {
  // Never confirmed: a small send may end before its receive starts, and programs rely on that.
  send(peer_, 0, data_, bytes_);
}

Operation::Action PointToPointSend::advance() {
  return Action::kDone;
}

PointToPointReceive::PointToPointReceive(Signature signature, int peer, int tag, void* data, size_t bytes)
    : PointToPoint(signature, tag), peer_(peer), data_(data), bytes_(bytes) {}

bool PointToPointReceive::matches(int source, const Header& header) const {
  return header.operation.key == tag() && (peer_ == -1 || peer_ == source);
}

void PointToPointReceive::launch() {
  receive(peer_, 0, data_, bytes_);
}

Operation::Action PointToPointReceive::advance() {
  if (!received(0)) {
    return Action::kWait;
  }
  work_->set_source(source(0));
  return Action::kDone;
}

} // namespace fog
