// Data of messages to processes of this host whose owners take no part in moving it, as those of windows: the transport itself copies it into
// a stream, and out of it to its place.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "transport/shared_memory/streams.hpp"
#include "transport/transport.hpp"

namespace fog::shared_memory {

// All of a process. Every call needs the engine's lock.
class Copies {
 public:
  // Owners whose memory is not used any more go to `released`.
  Copies(Streams& streams, Links& links, std::vector<std::shared_ptr<TransferOwner>>& released);
  ~Copies();

  // Sends `header` and the data to a peer that has attached this process's inbox. `owner` is kept, and the data as it is, until `ended` has
  // been called.
  void send(PeerId peer, Header header, const void* data, const std::shared_ptr<TransferOwner>& owner, std::function<void()> ended);
  // The header as streams know it: such a message has its own use for `transfer`, and is of no group, as it arrives whatever has failed.
  static Header of_stream(Header header);
  void on_announcement(PeerId source, const Header& header);
  std::shared_ptr<Incoming> receive(PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner);

  // True if anything moved.
  bool poll();
  bool sending() const {
    return !out_.empty();
  }
  // `peer` takes nothing any more: of one group, or of any (0).
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
