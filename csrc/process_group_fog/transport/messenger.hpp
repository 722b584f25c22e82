// Messages between processes: through shared memory on one host, over MPI point-to-point between hosts.
//
// Every message starts with a header that the receiver gets before it has asked for anything: it learns who wants what, so
// a message that nobody expects is seen and reported instead of waiting forever. Small data comes with the header. Large
// data follows on an MPI tag of its own once the receiver has a place for it. On one host it streams through a window of
// shared memory, which stays in the cache: the sender fills it, once for all its readers, while they empty it. Where no
// window is free the receiver reads the sender's memory. Every call needs the engine's lock.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "job/mpi_api.hpp"
#include "core/failure.hpp"
#include "transport/shared_memory/local_links.hpp"
#include "transport/message.hpp"
#include "job/mpi_runtime.hpp"
#include "job/mpi_watchdog.hpp"

namespace fog {

// Owner of memory that MPI or a peer reads, or MPI writes; kept alive until they are done with it.
class TransferOwner {
 public:
  virtual ~TransferOwner() = default;
  // Part number `part` of the transfer with this token is complete.
  virtual void on_transfer(size_t token, size_t part) = 0;
  virtual void on_transfer_error(size_t token, const std::string& reason) = 0;
  // A stream that this owner sends has room, or one that it reads has `filled` bytes in all.
  virtual void on_room() = 0;
  virtual void on_filled(size_t token, size_t filled) = 0;
};

// Data on its way to readers of this host through a window.
struct Stream {
  struct Reader {
    int rank; // of the world
    size_t emptied = 0;
  };
  const char* data;
  size_t bytes;
  char* window;
  size_t filled = 0; // bytes that have come into the window
  std::vector<Reader> readers;
  std::weak_ptr<TransferOwner> owner;
  uint64_t transfer;
  uint64_t group;
  uint32_t offer_index;
  uint32_t window_index;
  bool filling = false; // a thread writes to the window, without the engine's lock
  bool closed = false; // nobody reads it any more

  // How far the window may be filled now.
  size_t limit() const;
  // Whether all readers have all of it.
  bool emptied() const {
    return std::all_of(readers.begin(), readers.end(), [this](const Reader& reader) { return reader.emptied == bytes; });
  }
};

class MessageHandler {
 public:
  virtual ~MessageHandler() = default;
  // `data` holds header.bytes bytes if they came with the header, else nullptr.
  virtual void on_message(int source, const Header& header, const char* data) = 0;
  // Whether a process is known to have ended: MPI must not be asked to send anything there, see Lifelines.
  virtual bool has_ended(int peer) = 0;
};

// The receiver's process has ended. Those that use messages know how to name it.
class Unreachable : public std::exception {
 public:
  const char* what() const noexcept override {
    return kLost;
  }
};

class Messenger {
 public:
  // Data of at most so many bytes comes with its header, whatever the way.
  static constexpr size_t kInlineBytes = 8192;
  // On one host more may: two copies are cheaper there than to wait until the receiver has read it.
  static constexpr size_t kLocalInlineBytes = 32768;
  // Larger data goes in several MPI messages of so many bytes, the last of fewer: what has come can be used while the rest is
  // on its way. Few enough that looking after them costs little.
  static size_t part_bytes(size_t bytes) {
    constexpr size_t kLeast = size_t(1) << 20;
    constexpr size_t kMost = size_t(1) << 30; // MPI's counts are C ints
    return std::clamp((bytes / 64 + 63) & ~size_t(63), kLeast, kMost);
  }

  Messenger(Runtime& runtime, MessageHandler& handler, Watchdog& watchdog);

  LocalLinks& local() {
    return local_;
  }

  // Whether data may also be left in this process's memory for the receiver to read there.
  enum class Way { kBest, kMessages };
  struct Sent {
    size_t parts = 0; // so many on_transfer() calls will follow for `data`; if 0, it was copied and may be reused at once
    bool answered = false; // the last of them says that the receiver has accepted the message
  };
  // Throws Unreachable, or DistBackendError for what MPI reports.
  Sent send(
      int destination,
      Header header,
      const void* data,
      const std::shared_ptr<TransferOwner>& owner,
      size_t token,
      Way way = Way::kBest);

  // Receives the data of a message that delivers it as payload. Returns how many on_transfer() calls will follow.
  size_t receive(int source, const Header& header, void* data, const std::shared_ptr<TransferOwner>& owner, size_t token);

  // `peer` has asked for it (or not any more): what is sent there stays here until an operation there takes it.
  void hold_back(int peer, bool hold) {
    held_[peer] = hold;
  }
  // Whether that holds, or too much waits here for `destination` as it is.
  bool holds_back(int destination) const {
    constexpr size_t kMostUnsent = size_t(4) << 20;
    return held_[destination] || local_.unsent(destination) + unsent_[destination] > kMostUnsent;
  }

  // Whether `destination` can be sent a stream.
  bool streams_to(int destination) const {
    return local_.reaches(destination) && local_.attached_by(destination) && waiting_[destination].empty();
  }

  // Streams `bytes` of `data` to several ranks, all of which streams_to() allows. Null if no window is free, or the data is
  // small. Each of them gets an announce()ment; the owner fills the window and calls fill().
  std::shared_ptr<Stream> open_stream(
      const std::vector<int>& destinations,
      uint64_t group,
      const void* data,
      size_t bytes,
      const std::shared_ptr<TransferOwner>& owner);
  void announce(const Stream& stream, int destination, Header header);
  // Around writing to the window without the engine's lock: meanwhile it goes to nobody else, whatever becomes of the stream.
  void begin_filling(Stream& stream) {
    stream.filling = true;
  }
  void end_filling(Stream& stream);
  // `filled` bytes are in the window; once all are, `data` is not needed any more.
  void fill(const std::shared_ptr<Stream>& stream, size_t filled);

  // The reader's side: on_filled() will follow, with what there is now to begin with. `token` is the owner's.
  void read_stream(int source, const Header& header, const std::shared_ptr<TransferOwner>& owner, size_t token);
  // `emptied` bytes have been taken. False if the sender had given up: what was read may be anything.
  bool empty(int source, const Header& header, size_t emptied);

  // Tells the sender that its offered data has been read. False if it had withdrawn the offer: what was read may be
  // anything.
  bool take(int source, const Header& header);

  // Withdraws what `owner` offers or streams: from now on its memory may change.
  void withdraw(const TransferOwner& owner);
  // Withdraws all streams of a group that has failed.
  void withdraw_group(uint64_t group);
  // A process that has ended takes nothing any more; one that has destroyed its group nothing of that.
  void forget(int peer);
  void forget(int peer, uint64_t group);

  // Looks for news once; true if anything arrived or was completed.
  bool poll();

  // MPI cannot be called any more: nothing comes over it, and nothing goes. False if that was known.
  bool give_up_mpi();

  // Whether something may come that rings no bell, because it comes over MPI.
  bool must_poll() {
    return !given_up_ && (!requests_.empty() || !sources_waiting_.empty() || !local_.attached_by_all() || poll_further());
  }

  // Whether messages of this process may still be on their way out of it.
  bool sending() const {
    return sending_ > 0 || !offers_.empty() || local_.waiting_for_space() || (!given_up_ && poll_further());
  }

  // Owners whose last transfer ended; their memory is to be released outside of the engine's lock.
  std::vector<std::shared_ptr<TransferOwner>> take_released();

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kControlTag = 0;
  using Buffer = std::vector<char>;

  struct Transfer {
    std::unique_ptr<Buffer> buffer; // of a small message
    std::shared_ptr<TransferOwner> owner; // of separate data
    size_t token = 0;
    bool outgoing = false;
    size_t part = 0;
    int destination = -1; // of a small message
  };
  struct Offer {
    std::shared_ptr<TransferOwner> owner;
    size_t token;
    int destination;
    uint32_t index;
  };
  // A message of this host that no offer was free for, or that came after one.
  struct Waiting {
    Header header;
    const void* data; // of what is to be offered
    std::vector<char> copy; // of what is not
    std::shared_ptr<TransferOwner> owner;
    size_t token;
  };
  struct Reading {
    size_t filled = 0;
    size_t bytes = SIZE_MAX; // in all, once somebody reads it
    std::weak_ptr<TransferOwner> owner;
    size_t token = 0;
  };
  struct Incoming {
    MPI_Request request;
    std::unique_ptr<Buffer> buffer;
    size_t length;
  };

  template <typename Start>
  size_t transfer(
      const Header& header, const std::shared_ptr<TransferOwner>& owner, size_t token, bool outgoing, const char* call, Start&& start);
  void check_reachable(int destination) const;
  size_t send_payload(
      int destination, const Header& header, const void* data, const std::shared_ptr<TransferOwner>& owner, size_t token, bool hold);
  // How data of a message to a rank of this host goes that does not come with its header and is read where it is.
  std::optional<Delivery> offered_as(int destination, const Header& header, const void* data) const;
  // False if no offer is free, or `destination` has its share of them.
  bool offer(
      int destination, Header header, const void* data, const std::shared_ptr<TransferOwner>& owner, size_t token, Delivery delivery);
  // Sends what can be sent of what waits.
  bool send_waiting();
  template <typename Which>
  void drop_waiting(Which&& which);
  // MPI may call a message sent and still hold it: it is looked after a while longer.
  bool poll_further() const {
    return polled_until_ != Clock::time_point() && Clock::now() < polled_until_;
  }
  std::unique_ptr<Buffer> take_buffer();
  void give_buffer(std::unique_ptr<Buffer> buffer);
  // MPI must not be at memory that nobody keeps: before a transfer starts there is room for it, so that track() cannot fail.
  void make_room();
  void track(MPI_Request request, Transfer transfer);
  bool test(MPI_Request& request, int peer);
  bool poll_messages();
  bool poll_transfers();
  bool drain(int source);
  void deliver(int source, std::unique_ptr<Buffer> buffer, size_t length);

  template <typename Which>
  void drop_offers(Which&& which);
  template <typename Which>
  void close_streams(Which&& which);
  void close_stream(uint64_t transfer);
  void on_taken(const Header& header);
  void on_emptied(int source, const Header& header);
  void on_local(int source, const char* record, size_t length);

  Runtime& runtime_;
  MessageHandler& handler_;
  Watchdog& watchdog_;
  LocalLinks local_;
  std::unordered_map<uint64_t, Offer> offers_; // by transfer
  std::vector<std::deque<Waiting>> waiting_; // by destination
  size_t waiting_count_ = 0;
  Clock::time_point polled_until_;
  std::unordered_map<uint64_t, std::shared_ptr<Stream>> streams_; // by transfer: going out
  std::vector<std::unordered_map<uint64_t, Reading>> reading_; // by source, by its transfer: coming in
  uint64_t next_transfer_ = 1;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<uint32_t> next_tag_; // by destination
  std::vector<std::deque<Incoming>> incoming_; // by source: messages whose data is not here yet, in order
  std::vector<int> sources_waiting_;
  std::vector<MPI_Request> requests_;
  std::vector<Transfer> transfers_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::vector<std::pair<int, int>> done_; // index of a request, and MPI's error
  std::vector<std::pair<Transfer, int>> ended_;
  std::vector<std::shared_ptr<TransferOwner>> released_;
  size_t sending_ = 0;
  std::vector<bool> held_; // by destination
  std::vector<size_t> unsent_; // by destination: bytes of small messages that MPI still reads
  std::vector<size_t> offered_; // by destination: offers that stand
  bool given_up_ = false; // MPI
  std::vector<Transfer> lost_transfers_; // whose memory MPI may use for ever
};

} // namespace fog
