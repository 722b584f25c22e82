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
  kTaken, // the receiver has read the data that a message offered
  kFilled, // a stream has `bytes` of its data in its window or behind it
  kEmptied, // a reader of a stream has taken `bytes` of its data
  kError, // the sender's group failed; the data is the reason
  kClosed, // the sender has destroyed its group
  kGoodbye, // the sender ends; nothing follows but answers to others' goodbyes
  kGoodbyeTaken, // the sender has taken the receiver's goodbye and all before it
  kWindow, // what the sender asks of a window of the receiver: see window_service
  kWindowReply,
  kHold, // the receiver is to keep the data of its messages until it is asked for: too much of it waits here
  kRelease, // not any more
};

// What a message of kind kWindow asks for, as its `step`.
enum class WindowOp : uint16_t { kPut, kAccumulate, kGet, kWrite, kSignal, kLock, kUnlock, kLeave };

// Where the data of a message is.
enum class Delivery : uint8_t {
  kInline, // behind the header
  kPayload, // in MPI messages with the tag `payload_tag`, straight into its place
  kStream, // in a window that the sender, which is on this host, fills again and again as its readers empty it
  kOffer, // in the memory of the sender, which is on this host: at `address`, to be read while the offer stands
  kMapped, // as kOffer, in the arena of the sender, which the receiver has mapped
};

// Every message starts with one of these.
struct Header {
  MessageKind kind = MessageKind::kData;
  Delivery delivery = Delivery::kInline;
  uint8_t wants_confirm = 0;
  uint16_t step = 0; // which message of the operation between these two ranks
  uint16_t use = 0; // of an operation's name, by the sender's count
  uint32_t payload_tag = 0;
  uint32_t offer = 0; // number of the offer in the sender's inbox
  uint32_t window = 0; // and of the window of a stream
  uint32_t generation = 0; // of that count
  uint64_t transfer = 0; // the sender's number for what is offered, streamed, or taken
  uint64_t address = 0;
  uint64_t group = 0;
  uint64_t key = 0; // of the operation within the group
  uint64_t bytes = 0; // of data
  double scale = 1.0; // the sender's weight for this receiver
  Signature signature;
};
static_assert(std::is_trivially_copyable_v<Header>);

// What is wrong with a header that `came` bytes follow; nullptr if nothing is. `local`: it came through shared memory. What passes
// can be handled without reading or writing where it must not: the operation that it is for compares the rest with its own.
const char* fault_of(const Header& header, size_t came, bool local);

} // namespace fog
