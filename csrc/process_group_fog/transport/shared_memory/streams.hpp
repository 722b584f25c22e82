// Data on its way between processes of one host through chunks of shared memory.
//
// The sender copies a part of the data into a chunk, once for all its readers, and tells them; they copy it to its place, or reduce it where it
// is, and say how far they are; then the chunk is free again. Chunks that were just emptied are filled first: they are in the cache.
//
// What is on the way is bounded for each reader. One that does not come, or is slow, keeps its share of the chunks and no more, and the
// others go on without it: what it has missed is copied for it again, later. A reader whose operation takes the data, and says so, gets at
// least one chunk for it whatever else is on the way, so all goes on that can.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "transport/shared_memory/links.hpp"
#include "transport/transport.hpp"

namespace fog::shared_memory {

class Streams;

// From this process to some of its host.
class OutgoingStream {
 public:
  using Fill = Outgoing::Fill;

  // Whether all of it is in chunks, or its readers have gone; for one of them.
  bool sent_all() const;
  bool sent_all(PeerId peer) const;
  size_t sent() const;
  // Whether nobody reads it any more.
  bool closed() const {
    return closed_;
  }
  std::optional<Fill> next_fill();
  void filled(const Fill& fill);

 private:
  friend class Streams;
  struct Reader {
    PeerId peer;
    size_t sent = 0; // bytes that are in chunks, or were
    size_t taken = 0;
    bool takes = false; // its operation has come
    bool asked = false; // whether it has
  };
  struct Chunk {
    uint32_t index;
    size_t end; // of its data
    bool extra; // beyond all shares
    std::vector<size_t> readers; // that have not taken it
  };

  Streams* streams_ = nullptr;
  const char* data_ = nullptr;
  size_t bytes_ = 0;
  uint64_t transfer_ = 0;
  uint64_t group_ = 0;
  std::vector<Reader> readers_;
  std::deque<Chunk> chunks_; // in the order in which they were filled
  std::optional<Chunk> filling_; // a thread writes to it, without the lock
  std::weak_ptr<TransferOwner> owner_;
  bool closed_ = false; // nobody reads it any more
};

// All of a process. Every call needs the engine's lock.
class Streams {
 public:
  explicit Streams(Links& links);

  // A number that no transfer of this process has had.
  uint64_t next_transfer() {
    return next_transfer_++;
  }

  // --- going out ---
  // To peers that have all attached this process's inbox. Each of them is to get `header` from open().
  std::shared_ptr<OutgoingStream> open(
      const std::vector<PeerId>& readers, uint64_t group, const void* data, size_t bytes, const std::shared_ptr<TransferOwner>& owner);
  // What the header of a message whose data is that stream says.
  void announce(const OutgoingStream& stream, Header& header) const;
  // Its memory may change from now on.
  void withdraw(const TransferOwner& owner);
  void withdraw_group(uint64_t group);
  // `peer` takes nothing any more: of one group, or of any (0).
  void forget(PeerId peer, uint64_t group);

  // --- coming in ---
  std::shared_ptr<Incoming> receive(PeerId source, const Header& header, const std::shared_ptr<TransferOwner>& owner);
  // Nobody takes the data of that announcement.
  void ignore(PeerId source, const Header& header);
  // `owner` reads nothing any more.
  void abandon(const TransferOwner& owner);

  // --- what peers say; DistBackendError where it cannot be ---
  void on_announcement(PeerId source, const Header& header);
  void on_filled(PeerId source, const Header& header);
  void on_emptied(PeerId source, const Header& header);
  void on_wanted(PeerId source, const Header& header);

 private:
  friend class OutgoingStream;
  class Reading;

  std::optional<Outgoing::Fill> next_fill(OutgoingStream& stream);
  void filled(OutgoingStream& stream, const Outgoing::Fill& fill);
  // Those of the readers at `position` that the next `bytes` can be filled for.
  std::vector<size_t> ready_at(const OutgoingStream& stream, size_t position, size_t bytes) const;
  size_t share() const;
  std::optional<uint32_t> take_chunk(bool extra);
  void give_chunk(OutgoingStream& stream, const OutgoingStream::Chunk& chunk);
  // `reader` of `stream` has taken so much.
  void took(OutgoingStream& stream, size_t reader, size_t taken);
  void close(OutgoingStream& stream, bool withdrawn);
  template <typename Which>
  void close_all(Which&& which);
  void wake_starving();
  void say(PeerId peer, MessageKind kind, uint64_t transfer, size_t bytes, uint32_t chunk = 0);

  Links& links_;
  uint64_t next_transfer_ = 1;
  std::unordered_map<uint64_t, std::shared_ptr<OutgoingStream>> outgoing_; // by transfer
  std::unordered_map<PeerId, std::unordered_map<uint64_t, std::shared_ptr<Reading>>> reading_; // by source, by its transfer
  std::unordered_map<PeerId, size_t> held_; // chunks that each peer has not taken
  std::vector<uint32_t> free_; // the one used last comes last
  std::vector<uint32_t> free_extra_;
  uint32_t touched_ = 0; // chunks below have been used
  uint32_t touched_extra_ = 0;
  std::set<std::pair<uint64_t, PeerId>> starving_; // streams that lack a chunk for a peer, the oldest first
};

} // namespace fog::shared_memory
