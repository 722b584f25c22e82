// Messages to processes of this host whose owners do not help to move the data, such as those of windows. The transport
// itself copies the data into a stream, and out of it to its place.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "transport/shared_memory/streams.hpp"
#include "transport/transport.hpp"

namespace fog::shared_memory {

// All copies of a process. Every call needs the engine's lock.
class Copies {
 public:
  // Owners whose memory is not used any more are added to `released`.
  Copies(Streams& streams, Links& links, std::vector<std::shared_ptr<TransferOwner>>& released);
  ~Copies();

  // Sends `header` and the data to a peer that has attached this process's inbox. `owner` is kept alive, and the data
  // must not change, until `ended` has been called.
  void send(PeerId peer, Header header, const void* data, const std::shared_ptr<TransferOwner>& owner, std::function<void()> ended);
  std::shared_ptr<Incoming> receive(PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner);

  // Returns true if data moved.
  bool poll();
  bool sending() const {
    return !out_.empty();
  }
  // `peer` receives no more data of this group, or of any group if it is 0.
  void forget(PeerId peer, uint64_t group);

 private:
  class Out;
  class In;

  Streams& streams_;
  Links& links_;
  std::vector<std::shared_ptr<TransferOwner>>& released_;
  std::vector<std::shared_ptr<Out>> out_;
  std::unordered_set<std::shared_ptr<In>> in_;
};

} // namespace fog::shared_memory
