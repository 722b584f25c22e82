// Messages between processes: through shared memory on one host, over MPI point-to-point between hosts.
//
// Every message starts with a header that the receiver gets before it has asked for anything: it learns who wants what, so
// a message that nobody expects is seen and reported instead of waiting forever. Small data comes with the header. Large
// data follows on an MPI tag of its own once the receiver has a place for it; on one host the receiver reads it from the
// sender's memory, in one copy. Every call needs the engine's lock, but for the last ones.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "api.hpp"
#include "local_links.hpp"
#include "message.hpp"
#include "runtime.hpp"

namespace fog::mpi {

// Owner of memory that MPI or a peer reads, or MPI writes; kept alive until they are done with it.
class TransferOwner {
 public:
  virtual ~TransferOwner() = default;
  // One part of the transfer with this token is complete.
  virtual void on_transfer(size_t token) = 0;
  virtual void on_transfer_error(size_t token, const std::string& reason) = 0;
};

class MessageHandler {
 public:
  virtual ~MessageHandler() = default;
  // `data` holds header.bytes bytes if they came with the header, else nullptr.
  virtual void on_message(int source, const Header& header, const char* data) = 0;
};

class Messenger {
 public:
  // Data of at most so many bytes comes with its header, whatever the way.
  static constexpr size_t kInlineBytes = 8192;
  // On one host more may: two copies are cheaper there than to wait until the receiver has read it.
  static constexpr size_t kLocalInlineBytes = 32768;
  // Larger data goes in several MPI messages, whose counts are C ints.
  static constexpr size_t kSegmentBytes = size_t(1) << 30;

  Messenger(Runtime& runtime, MessageHandler& handler);

  LocalLinks& local() {
    return local_;
  }

  // Returns how many on_transfer() calls will follow for `data`: 0 if it was copied and may be reused at once.
  size_t send(int destination, Header header, const void* data, const std::shared_ptr<TransferOwner>& owner, size_t token);

  // Receives the data of a message that delivers it as payload. Returns how many on_transfer() calls will follow.
  size_t receive(int source, const Header& header, void* data, const std::shared_ptr<TransferOwner>& owner, size_t token);

  // Tells the sender that its offered data has been read. False if it had withdrawn the offer: what was read may be
  // anything.
  bool take(int source, const Header& header);

  // Withdraws what `owner` offers: from now on its memory may change.
  void withdraw(const TransferOwner& owner);
  // A process that has ended takes nothing any more.
  void forget(int peer);

  // Looks for news once; true if anything arrived or was completed.
  bool poll();

  // Whether something may come that rings no bell, because it comes over MPI.
  bool must_poll() {
    return !requests_.empty() || !sources_waiting_.empty() || !local_.attached_by_all();
  }

  // Whether messages of this process may still be on their way out of it.
  bool sending() const {
    return sending_ > 0 || !offers_.empty() || local_.waiting_for_space();
  }

  // Owners whose last transfer ended; their memory is to be released outside of the engine's lock.
  std::vector<std::shared_ptr<TransferOwner>> take_released();

 private:
  static constexpr int kControlTag = 0;
  using Buffer = std::vector<char>;

  struct Transfer {
    std::unique_ptr<Buffer> buffer; // of a small message
    std::shared_ptr<TransferOwner> owner; // of separate data
    size_t token = 0;
    bool outgoing = false;
  };
  struct Offer {
    std::shared_ptr<TransferOwner> owner;
    size_t token;
    int destination;
    uint32_t index;
  };
  struct Incoming {
    MPI_Request request;
    std::unique_ptr<Buffer> buffer;
  };

  size_t send_payload(
      int destination, const Header& header, const void* data, const std::shared_ptr<TransferOwner>& owner, size_t token);
  std::unique_ptr<Buffer> take_buffer();
  void give_buffer(std::unique_ptr<Buffer> buffer);
  void track(MPI_Request request, Transfer transfer);
  bool poll_messages();
  bool poll_transfers();
  bool drain(int source);
  void deliver(int source, std::unique_ptr<Buffer> buffer);

  template <typename Which>
  void drop_offers(Which&& which);
  void on_local(int source, const Header& header, const char* data);

  Runtime& runtime_;
  MessageHandler& handler_;
  LocalLinks local_;
  std::unordered_map<uint64_t, Offer> offers_; // by transfer
  uint64_t next_transfer_ = 1;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<uint32_t> next_tag_; // by destination
  std::vector<std::deque<Incoming>> incoming_; // by source: messages whose data is not here yet, in order
  std::vector<int> sources_waiting_;
  std::vector<MPI_Request> requests_;
  std::vector<Transfer> transfers_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::vector<std::shared_ptr<TransferOwner>> released_;
  size_t sending_ = 0;
};

} // namespace fog::mpi
