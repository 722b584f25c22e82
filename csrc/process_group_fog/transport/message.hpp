// The wire format between two processes of one world.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/signature.hpp"

namespace fog {

enum class MessageKind : uint8_t {
  kData = 1, // part of an operation
  kPointToPoint, // a send; the key is the user's tag
  kConfirm, // the receiver of a kData message has accepted it
  kTaken, // the receiver has read the data in the sender's arena; or chunks of data that is put, see notified_puts
  kFilled, // the data of a stream from the end of the last chunk to `bytes` is in the chunk `chunk`
  kEmptied, // a reader of a stream has taken `bytes` of its data; 0 bytes if that answers kWanted before any were taken
  kError, // the group failed; the data is the reason
  kClosed, // the sender has destroyed its group
  kGoodbye, // the sender ends; only answers to others' goodbyes follow
  kGoodbyeTaken, // the sender has received the receiver's goodbye and all messages before it
  kWindow, // a request to a window of the receiver, see window_service
  kWindowReply,
  kHold, // too much of the receiver's data waits at the sender: keep the data of its messages until asked for it
  kRelease, // ends kHold
  kSlots, // the sender lends the receiver slots for its puts, see notified_puts
  kPlaced, // says where the data of a put goes whose header did not know it yet
  kAsk, // the sender's operation is late: asks whether the receiver waits in it, and for which ranks
  kAnswer, // the answer to kAsk, see Reply
  // the sender of a stream asks for kEmptied as soon as an operation there takes the data; or the receiver of data that is put
  // takes it now
  kWanted,
  kFragment, // a part of the data of the next message of this sender, to a receiver on this host
  kMembership, // a part of a message about the job's members, see MembershipMail; it belongs to no group
};

// What a kWindow message asks for.
enum class WindowOp : uint16_t { kPut, kAccumulate, kGet, kWrite, kSignal, kLock, kUnlock, kLeave };

// The place of a message's data. Data that streams, is put, or is read in the sender's arena is a transfer, and has a
// number of the sender.
enum class Delivery : uint8_t {
  kInline, // behind the header
  kPayload, // by TCP with the tag `payload_tag`, received directly into their place
  kStream, // in chunks of shared memory; the sender is on this host and fills them as its readers empty them
  kRemote, // in the receiver's memory, into whose slots the sender puts it
  kMapped, // in the arena of the sender, which is on this host; the receiver has mapped that arena
  kFragments, // in the kFragment messages before it
};

// Of kData, kPointToPoint, kConfirm, kAsk and kAnswer.
struct OfOperation {
  uint64_t key = 0; // of the operation within the group
  uint32_t generation = 0; // of the count in `use`
  uint16_t use = 0; // how often the sender has used the operation's name
  uint16_t step = 0; // number of the message in the operation, between these two ranks
  Signature signature;
};

// Of kWindow and kWindowReply.
struct OfWindow {
  uint64_t number; // of the window within the group
  uint64_t request; // the origin's number, which the reply repeats; 0 if it expects none
  uint64_t offset; // where kWrite writes
  uint64_t puts; // see WindowRequest
  double p; // the weight that goes with the data, if `has_p`
  WindowOp op;
  uint8_t has_p;
  uint8_t needs_mutex;
  uint8_t failed; // of a reply: its data is the reason
};

// Of kMembership. The parts of a message follow each other.
struct OfMembership {
  static constexpr uint32_t kMostBytes = uint32_t(1) << 20;

  uint64_t epoch; // of the job, as the sender knows it
  uint32_t whole; // size of the message
  uint32_t begin; // of this part
  uint8_t is_answer;
};

// Of kStream, kMapped, kFilled, kEmptied, and of kTaken and kWanted on one host: a transfer through its memory.
struct InSharedMemory {
  uint64_t transfer;
  uint64_t address; // in the sender's arena, for kMapped
  uint32_t withdrawals; // number of transfers that the sender had withdrawn before this one began
  uint32_t chunk; // for kFilled
};

// Of kRemote, kPlaced, and of kTaken and kWanted between hosts: a transfer by RMA.
struct InSlots {
  uint64_t transfer;
  uint32_t first_slot;
  uint32_t slots; // in kRemote, 0 if they are not known yet; in kPlaced, 0 if the data goes as payload
  uint32_t taken; // in kTaken: the chunks that the receiver has taken
};

// Of kSlots.
struct LentSlots {
  uint64_t address; // in the sender's pool
  uint32_t slots; // 0 if there is no room
};

// Every message begins with a header. Its kind says which member of the first union is set; its kind or its delivery says
// which of the second.
struct Header {
  MessageKind kind = MessageKind::kData;
  Delivery delivery = Delivery::kInline;
  uint8_t wants_confirm = 0;
  uint32_t payload_tag = 0; // for kPayload, and for kRemote if that becomes a payload
  uint64_t group = 0;
  uint64_t bytes = 0; // size of the data, or of its part of which the message tells
  double scale = 1.0; // the sender's weight for this receiver
  union {
    OfOperation operation = {};
    OfWindow window;
    OfMembership membership;
    int32_t failed_rank; // of kError: the rank where the group failed, which may not be the sender
  };
  union {
    InSharedMemory shared = {};
    InSlots put;
    LentSlots lent;
  };
};
static_assert(std::is_trivially_copyable_v<Header>);

// Returns whether it belongs to an operation. News of failures and ends, and windows' messages, do not wait for others.
inline bool is_in_order(const Header& header) {
  return header.kind == MessageKind::kData || header.kind == MessageKind::kPointToPoint;
}

// Throws DistBackendError: process `source` has sent a message of `length` bytes that is not valid.
[[noreturn]] void refuse_message(int source, size_t length, const char* why);

// Returns the header of such a message; `local` if it came through shared memory. Throws if it is not valid. A header
// that passes can be handled without access to wrong memory; the operation compares the remaining fields with its own.
Header checked_header(int source, const char* record, size_t length, bool local);

} // namespace fog
