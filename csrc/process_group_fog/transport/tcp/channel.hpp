// The bytes between this process and a peer: frames of small messages, and of parts of large data between them.
//
// All of them go by the first connection to the peer. Where that does not fill the link, additional ones take parts of the
// data for which the peer has asked, each with its place, so the order between connections does not matter. Each carries
// data from the side that has opened it to the other one only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
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
  size_t parts = 0; // that are being sent
  bool going = false; // is in the queue of its channel
  bool scattered = false; // a part of it has gone by an additional connection, so each further part tells its place
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
  // Returns the memory of the bytes from `at` on, or of the next ones, as far as it is contiguous; none if the sender may
  // not send any.
  Room room(std::optional<size_t> at) const;
  // These bytes have been written there.
  void come(std::optional<size_t> at, size_t bytes);
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
  std::map<size_t, size_t> ahead_; // what has come beyond that: begin and end of each range
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
  // Another connection is open: `sends` if it carries data to the peer, otherwise it carries data from there. Its number is
  // that of those before; the first connection is 0.
  void add(bool sends);
  // From now on data goes by the first connection and by so many of those that were added to send.
  void use(size_t additional) {
    used_ = additional;
  }
  // Nothing more goes by the additional connections, and they say so.
  void finish();
  // Withdraws the data of that owner, in both directions.
  void abandon(const TransferOwner& owner);
  // The connection carries nothing from now on. What waits for it is dropped.
  void close();

  // Returns the bytes that wait to be sent, without those of data.
  size_t unsent() const {
    return lines_.front().unsent();
  }
  // Nothing more is written to the peer: a connection has failed, and what it had taken may be lost.
  void mute() {
    mute_ = true;
  }
  bool is_mute() const {
    return mute_;
  }
  // Returns whether anything waits for that connection, or for any.
  bool wants_to_write(size_t number) const;
  bool wants_to_write() const;
  // A part that begins from now on has at most so many bytes.
  void limit_parts(size_t bytes) {
    most_of_part_ = bytes;
  }
  // Returns the bytes that the socket has taken, of the first connection or of all.
  uint64_t written() const {
    return lines_.front().written;
  }
  uint64_t written_by_all() const;
  // Writes as much as the socket takes, within limits. A failure shows in read().
  Result write(size_t number, int fd);

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
  Result read(size_t number, int fd);
  // Returns whether it was added to send.
  bool sends(size_t number) const {
    return lines_[number].sender > 0;
  }
  // An additional connection by which the peer sends has ended. It may be one that the peer has never used.
  void on_end(size_t number) {
    lost_ += lines_[number].has_finished ? 0 : 1;
  }
  // Returns whether additional connections have not brought all that the peer had sent before a message of the first one.
  bool awaits_others() const {
    return finished_ < added_;
  }
  // Returns whether they never will.
  bool awaits_lost() const {
    return lines_.size() - 1 - senders_ - lost_ < added_;
  }
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
    kAt, // the next part is of the data with that tag from byte `bytes` on; without it, a part follows what has come
    kAdded, // the sender has opened an additional connection, by which it sends
    kLast, // nothing more comes by this additional connection
  };
  struct Frame {
    Kind kind;
    uint32_t tag;
    uint64_t bytes; // behind the frame, unless the kind says otherwise
  };
  struct Part {
    std::array<Frame, 2> frames; // kAt and kPart, or kPart as the second one alone
    size_t first; // of the frames
    std::shared_ptr<OutgoingData> data;
    const char* begin;
    size_t sent; // with the frames
    std::unique_ptr<char[]> copy; // what `begin` points to if the data was withdrawn

    size_t of_frames() const {
      return (frames.size() - first) * sizeof(Frame);
    }
    size_t bytes() const {
      return frames[1].bytes;
    }
  };
  // What a connection is sending, and what it is receiving.
  struct Line {
    size_t sender = 0; // 1 for the first additional one that sends, and so on; 0 for all others
    std::string small; // frames in order, the first small_sent bytes of which have been sent
    size_t small_sent = 0;
    std::unique_ptr<Part> part; // that is being sent
    uint64_t written = 0;
    bool finishes = false; // kLast follows the part, or was sent

    std::unique_ptr<char[]> buffer;
    size_t begin = 0; // of the bytes in the buffer
    size_t end = 0;
    uint32_t part_tag = 0;
    size_t part_left = 0; // bytes of the part that is coming
    std::optional<size_t> part_at; // their place if they do not follow what has come
    std::optional<size_t> next_at; // that of the next part
    bool has_finished = false; // kLast has come

    size_t unsent() const {
      return small.size() - small_sent;
    }
    // So many bytes of the part have come.
    void pass(size_t bytes) {
      part_left -= bytes;
      if (part_at) {
        *part_at += bytes;
      }
    }
  };
  // Large enough for a message that comes with its data.
  static constexpr size_t kBuffer = size_t(128) << 10;

  void put(const Frame& frame) {
    append(&frame, sizeof(frame));
  }
  // Says that nothing more comes by that additional connection.
  static void put_last(Line& line);
  void append(const void* data, size_t bytes);
  // Returns data of which a part may go by that connection; `going_.end()` if there is none.
  std::deque<std::shared_ptr<OutgoingData>>::const_iterator next_for(const Line& line) const;
  void next_part(Line& line);
  static std::unique_ptr<Part> take_part(Line& line);
  static void leave_part(Line& line);
  void on_part_sent(Line& line);
  // All that was asked for has left, or the data is wanted no more.
  bool has_left(const OutgoingData& data) const {
    return data.begun == data.bytes && data.parts == 0 && sent_early_.count(data.tag) == 0;
  }
  void end(OutgoingData& data, bool sent);
  // Handles the frames that are in the buffer as a whole.
  void parse(Line& line);
  void on_frame(Line& line, const Frame& frame);
  // Bytes of the data with that tag from `at` on, or the next ones, which lie at `from`.
  void take(uint32_t tag, std::optional<size_t> at, const char* from, size_t bytes);
  void come(uint32_t tag, std::optional<size_t> at, IncomingData& data, size_t bytes);
  void forget_early(uint32_t tag);
  std::string take_early(uint32_t tag);

  const PeerId peer_;
  User& user_;
  bool closed_ = false;
  bool mute_ = false;
  int error_ = 0;

  std::deque<Line> lines_{1}; // by the number of the connection
  size_t senders_ = 0; // additional connections that were added to send
  size_t used_ = 0; // of them
  std::unordered_map<uint32_t, std::shared_ptr<OutgoingData>> offered_;
  std::deque<std::shared_ptr<OutgoingData>> going_; // data for which the peer has room
  std::unordered_map<uint32_t, size_t> sent_early_; // by tag, until the peer asks for it
  size_t early_ = 0; // their sum
  uint32_t next_tag_ = 0;
  size_t most_of_part_ = SIZE_MAX;

  size_t added_ = 0; // additional connections by which the peer sends, as it has said
  size_t finished_ = 0; // of them
  size_t lost_ = 0; // connections by which the peer may send that have ended without kLast
  std::unordered_map<uint32_t, std::weak_ptr<IncomingData>> coming_;
  std::unordered_map<uint32_t, std::string> came_early_; // of announced data
  size_t bytes_came_early_ = 0; // their sum
};

} // namespace fog::tcp
