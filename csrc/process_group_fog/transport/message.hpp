// The wire format between two processes of one world.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "core/signature.hpp"

namespace fog {

enum class MessageKind : uint8_t {
  kData = 1, // part of an operation
  kPointToPoint, // of a send; the key is the user's tag
  kConfirm, // the receiver of a kData message has accepted it
  kTaken, // the receiver has read the data that it found in the sender's arena
  kFilled, // the data of a stream from where the last chunk ended to `bytes` is in the chunk `chunk`
  kEmptied, // a reader of a stream has taken `bytes` of its data; none yet, where that was asked for
  kError, // the group failed; the data is the reason, the key the rank that it comes from, the sender or not
  kClosed, // the sender has destroyed its group
  kGoodbye, // the sender ends; nothing follows but answers to others' goodbyes
  kGoodbyeTaken, // the sender has taken the receiver's goodbye and all before it
  kWindow, // what the sender asks of a window of the receiver: see window_service
  kWindowReply,
  kHold, // the receiver is to keep the data of its messages until it is asked for: too much of it waits here
  kRelease, // not any more
  kSlots, // the receiver may put data into `chunk` slots at `address` of the sender's pool, see notified_puts; none if there is no room
  kPlaced, // the data of a transfer is put into `flags` slots from `chunk` on; it goes as payload if these are none
  kAsk, // the sender's operation is late: does the receiver wait in it, and for whom?
  kAnswer, // to that: see Standing
  kWanted, // the sender of a stream asks for kEmptied as soon as an operation there takes the data
};

// What a message of kind kWindow asks for, as its `step`.
enum class WindowOp : uint16_t { kPut, kAccumulate, kGet, kWrite, kSignal, kLock, kUnlock, kLeave };

// Where the data of a message is.
enum class Delivery : uint8_t {
  kInline, // behind the header
  kPayload, // in MPI messages with the tag `payload_tag`, straight into its place
  kStream, // in chunks of shared memory that the sender, which is on this host, fills as its readers empty them
  kRemote, // in the receiver's memory, into whose slots the sender puts it
  kMapped, // in the arena of the sender, which is on this host and which the receiver has mapped: at the sender's `address`
};

// Every message starts with one of these.
struct Header {
  MessageKind kind = MessageKind::kData;
  Delivery delivery = Delivery::kInline;
  uint8_t wants_confirm = 0;
  uint16_t step = 0; // which message of the operation between these two ranks
  uint16_t use = 0; // of an operation's name, by the sender's count
  uint32_t payload_tag = 0;
  uint32_t withdrawals = 0; // how many transfers the sender had withdrawn before this one began
  uint32_t chunk = 0; // of shared memory; or the first slot
  uint32_t flags = 0; // of messages of windows; or how many slots, none if that is still to be said
  uint32_t generation = 0; // of that count
  uint64_t transfer = 0; // the sender's number for what is streamed, put, or read in its arena
  uint64_t address = 0; // in its arena; or where in its pool the receiver says what it has taken
  uint64_t group = 0;
  uint64_t key = 0; // of the operation within the group
  uint64_t bytes = 0; // of data
  double scale = 1.0; // the sender's weight for this receiver
  Signature signature;
};
static_assert(std::is_trivially_copyable_v<Header>);

// Throws DistBackendError: process `source` has sent a message of `length` bytes that cannot be one.
[[noreturn]] void refuse_message(int source, size_t length, const char* why);

// The header of such a message, which came through shared memory if `local`; throws if it cannot be one. What passes can be handled
// without reading or writing where it must not: the operation that it is for compares the rest with its own.
Header checked_header(int source, const char* record, size_t length, bool local);

} // namespace fog
