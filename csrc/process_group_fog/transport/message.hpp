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
  kTaken, // the receiver has read the data in the sender's arena; or `chunk` chunks of data that is put, see notified_puts
  kFilled, // the data of a stream from the end of the last chunk to `bytes` is in the chunk `chunk`
  kEmptied, // a reader of a stream has taken `bytes` of its data; 0 bytes if that answers kWanted before any were taken
  kError, // the group failed; the data is the reason, and the key the rank where it failed, which may not be the sender
  kClosed, // the sender has destroyed its group
  kGoodbye, // the sender ends; only answers to others' goodbyes follow
  kGoodbyeTaken, // the sender has received the receiver's goodbye and all messages before it
  kWindow, // a request to a window of the receiver, see window_service
  kWindowReply,
  kHold, // too much of the receiver's data waits at the sender: keep the data of its messages until asked for it
  kRelease, // ends kHold
  // the receiver may put data into `chunk` slots at `address` of the sender's pool, see notified_puts; 0 if there is no
  // room
  kSlots,
  kPlaced, // the data of a transfer is put into `flags` slots from `chunk` on; if `flags` is 0 it goes as payload
  kAsk, // the sender's operation is late: asks whether the receiver waits in it, and for which ranks
  kAnswer, // the answer to kAsk, see Standing
  // the sender of a stream asks for kEmptied as soon as an operation there takes the data; or the receiver of data that is put
  // takes it now
  kWanted,
};

// The operation of a kWindow message, in its `step`.
enum class WindowOp : uint16_t { kPut, kAccumulate, kGet, kWrite, kSignal, kLock, kUnlock, kLeave };

// The place of a message's data.
enum class Delivery : uint8_t {
  kInline, // behind the header
  kPayload, // by TCP with the tag `payload_tag`, received directly into their place
  kStream, // in chunks of shared memory; the sender is on this host and fills them as its readers empty them
  kRemote, // in the receiver's memory, into whose slots the sender puts it
  kMapped, // at `address` in the arena of the sender, which is on this host; the receiver has mapped that arena
};

// Every message begins with a header.
struct Header {
  MessageKind kind = MessageKind::kData;
  Delivery delivery = Delivery::kInline;
  uint8_t wants_confirm = 0;
  uint16_t step = 0; // number of the message in the operation, between these two ranks
  uint16_t use = 0; // how often the sender has used the operation's name
  uint32_t payload_tag = 0;
  uint32_t withdrawals = 0; // number of transfers that the sender had withdrawn before this one began
  uint32_t chunk = 0; // a chunk of shared memory, or the first slot
  uint32_t flags = 0; // flags of window messages; or the number of slots, 0 if it is not known yet
  uint32_t generation = 0; // generation of that count
  uint64_t transfer = 0; // the sender's number of data that is streamed, put, or read in its arena
  uint64_t address = 0; // in its arena, or in its pool
  uint64_t group = 0;
  uint64_t key = 0; // of the operation within the group
  uint64_t bytes = 0; // size of the data
  double scale = 1.0; // the sender's weight for this receiver
  Signature signature;
};
static_assert(std::is_trivially_copyable_v<Header>);

// Throws DistBackendError: process `source` has sent a message of `length` bytes that is not valid.
[[noreturn]] void refuse_message(int source, size_t length, const char* why);

// Returns the header of such a message; `local` if it came through shared memory. Throws if it is not valid. A header
// that passes can be handled without access to wrong memory; the operation compares the remaining fields with its own.
Header checked_header(int source, const char* record, size_t length, bool local);

} // namespace fog
