// The bytes of one connection: frames of small messages, and of parts of large data between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/pulse.hpp"
#include "transport/transport.hpp"

namespace fog::tcp {

// Called when a peer no longer reads the memory. An empty text means success.
using Sent = std::function<void(const std::string& error)>;

// The most bytes that one side sends before the other asks for them, of all its data.
inline constexpr size_t kMostEarly = size_t(4) << 20;

// Large data of one message over TCP. It waits in its sender until the receiver has room for it, but for a part that goes
// early, so that a long path does not stand still until the receiver's answer.
struct OutgoingData {
  uint32_t tag = 0;
  const char* data = nullptr;
  size_t bytes = 0;
  std::shared_ptr<TransferOwner> owner; // keeps the data alive
  Sent sent;
  size_t room = 0; // the receiver has room up to this byte
  size_t begun = 0; // the bytes up to this one are sent, or in the part that is being sent
  bool going = false; // is in the queue of its channel
  bool stopped = false; // the receiver wants no more, or the owner has withdrawn it
};

// Data that is received directly into its place, or into a ring of memory where the owner reads it. Every call needs the
// engine's lock.
class IncomingData final : public Incoming {
 public:
  // Tells the sender that there is room up to that byte.
  using Grant = std::function<void(size_t room)>;

  // With a place, `owner` keeps it alive. Call grant_room() next.
  IncomingData(const Header& header, void* place, const std::shared_ptr<TransferOwner>& owner, Grant grant);

  size_t available() const override {
    return come_;
  }
  void read(size_t from, size_t to, std::vector<Block>& blocks) const override;
  bool take(size_t bytes) override;
  bool in_place() const override {
    return place_ != nullptr;
  }

  struct Room {
    char* at;
    size_t bytes;
  };
  // Returns the memory of the next bytes, as far as it is contiguous; none if the sender may not send any.
  Room room() const;
  // These bytes have been written there.
  void come(size_t bytes);
  bool is_complete() const {
    return come_ == bytes_;
  }
  void grant_room();

  bool is_of(const TransferOwner& owner) const {
    return listener_.lock().get() == &owner;
  }
  // No more data comes: the sender has withdrawn it.
  void withdraw() {
    withdrawn_ = true;
  }
  // Ends the use of the place; the owner must be released without the lock.
  std::shared_ptr<TransferOwner> end() {
    return std::move(owner_);
  }
  // Tells the owner of progress.
  void tell() const;

 private:
  // The memory of data without a place: enough for a fast link.
  static constexpr size_t kMemory = size_t(4) << 20;
  static_assert(kMemory >= kMostEarly, "what came early finds room at once");

  const size_t bytes_;
  char* const place_;
  // A weak pointer, because the owner holds this object.
  const std::weak_ptr<TransferOwner> listener_;
  std::shared_ptr<TransferOwner> owner_;
  const Grant grant_;
  c10::DataPtr memory_;
  size_t capacity_;
  size_t come_ = 0;
  size_t taken_ = 0;
  size_t granted_ = 0;
  bool withdrawn_ = false;
};

// Every call needs the engine's lock.
class Channel {
 public:
  class User {
   public:
    virtual ~User() = default;
    // A message has come: a header, with data behind it.
    virtual void on_message(PeerId source, const char* record, size_t length) = 0;
    // The peer asks for this process's signs of life, has told its own, or counts this process as lost.
    virtual void on_ask(PeerId source) = 0;
    virtual void on_signs(PeerId source, const Signs& signs) = 0;
    virtual void on_expelled(PeerId source) = 0;
    // Memory of that owner is not used any more; it must be released without the lock.
    virtual void release(std::shared_ptr<TransferOwner> owner) = 0;
    // A buffer that channels lend each other: only one that has read a part of a message keeps it.
    virtual std::unique_ptr<char[]>& spare_buffer() = 0;
  };
  enum class Result {
    kNothing,
    kProgress,
    kEnd, // the other side has closed the connection, or it is broken
  };

  Channel(PeerId peer, User& user) : peer_(peer), user_(user) {}

  // --- to the peer ---
  // Queues a header with a copy of the data.
  void queue(const Header& header, const void* data, size_t bytes);
  // Data that leaves when the peer asks for it; the first `early` bytes leave at once, after the header. It counts as sent
  // when the peer has asked, and all has left.
  void offer(std::shared_ptr<OutgoingData> data, size_t early);
  // Returns the bytes that went early, and that the peer has not asked for yet.
  size_t early() const {
    return early_;
  }
  uint32_t next_tag() {
    next_tag_ += next_tag_ == UINT32_MAX ? 2 : 1;
    return next_tag_;
  }
  // These go before data, as messages do.
  void ask_for_signs() {
    put({Kind::kAskForSigns, 0, 0});
  }
  void tell(const Signs& signs) {
    put({Kind::kSigns, 0, sizeof(signs)});
    append(&signs, sizeof(signs));
  }
  void expel() {
    put({Kind::kExpelled, 0, 0});
  }
  // Withdraws the data of that owner, in both directions.
  void abandon(const TransferOwner& owner);
  // The connection carries nothing from now on. What waits for it is dropped.
  void close();

  // Returns the bytes that wait to be sent, without those of data.
  size_t unsent() const {
    return small_.size() - small_sent_;
  }
  bool wants_to_write() const {
    return !closed_ && (unsent() > 0 || part_ || !going_.empty());
  }
  // A part that begins from now on has at most so many bytes.
  void limit_parts(size_t bytes) {
    most_of_part_ = bytes;
  }
  // Returns the bytes that the socket has taken.
  uint64_t written() const {
    return written_;
  }
  // Writes as much as the socket takes, within limits. A failure shows in read().
  Result write(int fd);

  // --- from the peer ---
  // The header of that data has come, and a part of the data may do so before it is expected. Call expect() or ignore().
  void announce(uint32_t tag) {
    came_early_[tag];
  }
  // Asks for the data.
  void expect(uint32_t tag, const std::shared_ptr<IncomingData>& data);
  // Nobody will expect it.
  void ignore(uint32_t tag);
  // Queues the news that the data with that tag may come up to that byte.
  void ask(uint32_t tag, size_t room);
  // Reads what has come, within limits. Throws DistBackendError if that is not a message.
  Result read(int fd);
  // Returns the error with which the connection has ended; 0 if the other side has closed it.
  int error() const {
    return error_;
  }

 private:
  enum class Kind : uint32_t {
    kMessage = 1, // a header with data
    kPart, // the next bytes of the data with that tag
    kAsk, // the receiver has room for the data with that tag up to byte `bytes`
    kStop, // the receiver takes no more of that data
    kWithdrawn, // the sender has withdrawn that data
    kAskForSigns, // see ask_for_signs()
    kSigns, // with Signs
    kExpelled, // the sender counts the receiver as lost
  };
  struct Frame {
    Kind kind;
    uint32_t tag;
    uint64_t bytes; // behind the frame, unless the kind says otherwise
  };
  struct Part {
    Frame frame;
    std::shared_ptr<OutgoingData> data;
    const char* begin;
    size_t sent; // with the frame
    std::unique_ptr<char[]> copy; // what `begin` points to if the data was withdrawn
  };
  // Large enough for a message that comes with its data.
  static constexpr size_t kBuffer = size_t(128) << 10;

  void put(const Frame& frame) {
    append(&frame, sizeof(frame));
  }
  void append(const void* data, size_t bytes);
  void next_part();
  void leave_part();
  void on_part_sent();
  void end(OutgoingData& data, bool sent);
  // Handles the frames that are in the buffer as a whole.
  void parse();
  void on_frame(const Frame& frame);
  // Bytes of the data with that tag, which lie at `from`.
  void take(uint32_t tag, const char* from, size_t bytes);
  void come(uint32_t tag, IncomingData& data, size_t bytes);
  void forget_early(uint32_t tag);
  std::string take_early(uint32_t tag);

  const PeerId peer_;
  User& user_;
  bool closed_ = false;
  int error_ = 0;

  std::string small_; // frames in order, the first small_sent_ bytes of which have been sent
  size_t small_sent_ = 0;
  std::unique_ptr<Part> part_; // that is being sent
  std::unordered_map<uint32_t, std::shared_ptr<OutgoingData>> offered_;
  std::deque<std::shared_ptr<OutgoingData>> going_; // data for which the peer has room
  std::unordered_map<uint32_t, size_t> sent_early_; // by tag, until the peer asks for it
  size_t early_ = 0; // their sum
  uint32_t next_tag_ = 0;
  size_t most_of_part_ = SIZE_MAX;
  uint64_t written_ = 0;

  std::unique_ptr<char[]> buffer_;
  size_t begin_ = 0; // of the bytes in the buffer
  size_t end_ = 0;
  uint32_t part_tag_ = 0;
  size_t part_left_ = 0; // bytes of the part that is coming
  std::unordered_map<uint32_t, std::weak_ptr<IncomingData>> coming_;
  std::unordered_map<uint32_t, std::string> came_early_; // of announced data
  size_t bytes_came_early_ = 0; // their sum
};

} // namespace fog::tcp
