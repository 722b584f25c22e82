// Data on its way between processes of one host, through chunks of shared memory.
//
// The sender copies a part of the data into a chunk, once for all its readers, and tells them. They copy it to its
// place, or reduce it in place, and report how much they have taken; then the chunk is free again. The chunks that were
// emptied last are filled first, because they are in the cache.
//
// The data on its way is bounded for each reader. A reader that is late or slow occupies only its share of the chunks,
// and the others go on without it; the part that it has missed is copied again for it later. A reader whose operation
// takes the data, and has said so, always gets at least one chunk, so all operations that can go on do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "transport/shared_memory/links.hpp"
#include "transport/transport.hpp"

namespace fog::shared_memory {

class Streams;

// A stream from this process to some processes of its host.
class OutgoingStream {
 public:
  using Fill = Outgoing::Fill;

  // Returns whether all data is in chunks or the readers are gone: for all readers, or for one.
  bool sent_all() const;
  bool sent_all(PeerId peer) const;
  size_t sent() const;
  std::optional<Fill> next_fill();
  void filled(const Fill& fill);

 private:
  friend class Streams;
  struct Reader {
    PeerId peer;
    size_t sent = 0; // bytes that are or were in chunks
    size_t taken = 0;
    bool takes = false; // its operation receives the data
    bool asked = false; // kWanted was sent
  };
  struct Chunk {
    uint32_t index;
    size_t end; // end of its data
    bool extra; // beyond all shares
    std::vector<size_t> readers; // readers that have not taken it
  };

  Streams* streams_ = nullptr;
  const char* data_ = nullptr;
  size_t bytes_ = 0;
  uint64_t transfer_ = 0;
  uint64_t group_ = 0;
  std::vector<Reader> readers_;
  std::deque<Chunk> chunks_; // in the order in which they were filled
  std::optional<Chunk> filling_; // a thread writes to it without the lock
  std::weak_ptr<TransferOwner> owner_;
  bool closed_ = false; // no reader is left
};

// All streams of a process. Every call needs the engine's lock.
class Streams {
 public:
  explicit Streams(Links& links);

  // Returns a number that no other transfer of this process has.
  uint64_t next_transfer() {
    return next_transfer_++;
  }

  // --- outgoing ---
  // Opens a stream to peers that have all attached this process's inbox. Each of them must be sent a header that
  // announce() has completed.
  std::shared_ptr<OutgoingStream> open(
      const std::vector<PeerId>& readers, uint64_t group, const void* data, size_t bytes, const std::shared_ptr<TransferOwner>& owner);
  // Sets the fields of a message's header that describe the stream with its data.
  void announce(const OutgoingStream& stream, Header& header) const;
  // The memory may change from now on.
  void withdraw(const TransferOwner& owner);
  void withdraw_group(uint64_t group);
  // `peer` receives no more data of this group, or of any group if it is 0.
  void forget(PeerId peer, uint64_t group);

  // --- incoming ---
  std::shared_ptr<Incoming> receive(PeerId source, const Header& header, const std::shared_ptr<TransferOwner>& owner);
  // No operation will receive the data of that announcement.
  void ignore(PeerId source, const Header& header);
  // `owner` reads no more data.
  void abandon(const TransferOwner& owner);

  // --- messages of peers; they throw DistBackendError if these are not valid ---
  void on_announcement(PeerId source, const Header& header);
  void on_filled(PeerId source, const Header& header);
  void on_emptied(PeerId source, const Header& header);
  void on_wanted(PeerId source, const Header& header);

 private:
  friend class OutgoingStream;
  class Reading;

  std::optional<Outgoing::Fill> next_fill(OutgoingStream& stream);
  void filled(OutgoingStream& stream, const Outgoing::Fill& fill);
  // Returns the readers at `position` for which the next `bytes` may be filled.
  std::vector<size_t> ready_at(const OutgoingStream& stream, size_t position, size_t bytes) const;
  size_t share() const;
  std::optional<uint32_t> take_chunk(bool extra);
  void give_chunk(OutgoingStream& stream, const OutgoingStream::Chunk& chunk);
  // `reader` of `stream` has taken the first `taken` bytes.
  void took(OutgoingStream& stream, size_t reader, size_t taken);
  void close(OutgoingStream& stream, bool withdrawn);
  template <typename Which>
  void close_all(Which&& which);
  void wake_starving();
  void say(PeerId peer, MessageKind kind, uint64_t transfer, size_t bytes, uint32_t chunk = 0);

  Links& links_;
  uint64_t next_transfer_ = 1;
  std::unordered_map<uint64_t, std::shared_ptr<OutgoingStream>> outgoing_; // by transfer
  // by source, and by its transfer
  std::unordered_map<PeerId, std::unordered_map<uint64_t, std::shared_ptr<Reading>>> reading_;
  std::unordered_map<PeerId, size_t> held_; // chunks that each peer has not taken
  std::vector<uint32_t> free_; // the most recently used is last
  std::vector<uint32_t> free_extra_;
  uint32_t touched_ = 0; // chunks below this index have been used
  uint32_t touched_extra_ = 0;
  std::set<std::pair<uint64_t, PeerId>> starving_; // streams that lack a chunk for a peer, oldest first
};

} // namespace fog::shared_memory
