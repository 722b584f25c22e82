// Messages between processes that do not share memory. MPI and TCP are two ways to carry them.
//
// A header comes unasked, with small data behind it, and headers keep their order. Large data follows its header under a
// tag, and can be used in parts while the rest is on its way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/transport.hpp"

namespace fog {

// Every call needs the engine's lock.
class Wire {
 public:
  // Called when a peer no longer reads the memory. An empty text means success.
  using Sent = std::function<void(const std::string& error)>;

  virtual ~Wire() = default;

  // Sends a header with a copy of the data, or without data. Throws Unreachable.
  virtual void send(PeerId destination, const Header& header, const void* data, size_t bytes) = 0;
  // Returns the next tag for the data of a message, so that a receiver may take the data of one sender in any order.
  virtual uint32_t next_tag(PeerId destination) = 0;
  // Sends the data of a message with that tag. `held`: it must not count as sent before the receiver has asked for it.
  // `waits`: it may wait for go(). `owner` is kept alive until the data is not read any more.
  virtual void send_data(
      PeerId destination,
      uint32_t tag,
      const void* data,
      size_t bytes,
      bool held,
      bool waits,
      const std::shared_ptr<TransferOwner>& owner,
      Sent sent) = 0;
  // Starts the transfers of `owner` that wait for go(), all or those to one peer.
  virtual void go(const TransferOwner& owner, std::optional<PeerId> destination) = 0;
  virtual std::shared_ptr<Incoming> receive(
      PeerId source, const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner) = 0;
  // Tells that `owner` reads no more data, and that its data may change.
  virtual void abandon(const TransferOwner& owner) = 0;

  virtual bool poll() = 0;
  // Returns whether news may come that does not ring the doorbell.
  virtual bool must_poll() const = 0;
  // Returns whether messages may still be on their way out of this process.
  virtual bool sending() const = 0;
  // Returns whether any message has gone to that peer or come from it.
  virtual bool has_spoken_with(PeerId peer) const = 0;
  // Returns the bytes of small messages to a peer that have not left.
  virtual size_t unsent(PeerId destination) const = 0;
  // Owners whose last transfer has ended.
  virtual std::vector<std::shared_ptr<TransferOwner>>& released() = 0;
};

} // namespace fog
