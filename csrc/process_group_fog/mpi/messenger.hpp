// Messages between processes over MPI point-to-point.
//
// Small messages are one MPI message on one tag, which the receiver probes for: it learns who wants what before it has
// posted anything, so a message that nobody expects is seen and reported instead of waiting forever. Large data follows on
// a tag of its own once the receiver has a place for it. Every call needs the engine's lock.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "api.hpp"
#include "message.hpp"
#include "runtime.hpp"

namespace fog::mpi {

// Owner of memory that MPI reads or writes; kept alive until MPI is done with it.
class TransferOwner {
 public:
  virtual ~TransferOwner() = default;
  // One MPI request of the transfer with this token is complete.
  virtual void on_transfer(size_t token) = 0;
  virtual void on_transfer_error(size_t token, const std::string& reason) = 0;
};

class MessageHandler {
 public:
  virtual ~MessageHandler() = default;
  // `data` holds header.bytes bytes if the message came inline, else nullptr.
  virtual void on_message(int source, const Header& header, const char* data) = 0;
};

class Messenger {
 public:
  static constexpr size_t kInlineBytes = 8192;
  // Larger data goes in several MPI messages, whose counts are C ints.
  static constexpr size_t kSegmentBytes = size_t(1) << 30;

  Messenger(Runtime& runtime, MessageHandler& handler);

  // Returns how many on_transfer() calls will follow for `data`: 0 if it was copied and may be reused at once.
  size_t send(int destination, Header header, const void* data, const std::shared_ptr<TransferOwner>& owner, size_t token);

  // Receives the separate data of a message. Returns how many on_transfer() calls will follow.
  size_t receive(int source, const Header& header, void* data, const std::shared_ptr<TransferOwner>& owner, size_t token);

  // Drives MPI once; true if anything arrived or was completed.
  bool poll();

  // Whether messages of this process may still be on their way out of it.
  bool sending() const {
    return sending_ > 0;
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
  struct Incoming {
    MPI_Request request;
    std::unique_ptr<Buffer> buffer;
  };

  std::unique_ptr<Buffer> take_buffer();
  void give_buffer(std::unique_ptr<Buffer> buffer);
  void track(MPI_Request request, Transfer transfer);
  bool poll_messages();
  bool poll_transfers();
  bool drain(int source);
  void deliver(int source, std::unique_ptr<Buffer> buffer);

  Runtime& runtime_;
  MessageHandler& handler_;
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
