// The wire format between two processes of one world.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../signature.hpp"

namespace fog::mpi {

enum class MessageKind : uint8_t {
  kData = 1, // part of an operation
  kPointToPoint, // of a send; the key is the user's tag
  kConfirm, // the receiver of a kData message has accepted it
  kError, // the sender's group failed; the data is the reason
  kClosed, // the sender has destroyed its group
  kGoodbye, // the sender ends; nothing follows but answers to others' goodbyes
  kGoodbyeTaken, // the sender has taken the receiver's goodbye and all before it
};

// Every message starts with one of these. Data of at most Messenger::kInlineBytes follows in the same message, more comes
// as a separate one with tag `payload_tag`, straight into its place.
struct Header {
  MessageKind kind = MessageKind::kData;
  uint8_t wants_confirm = 0;
  uint16_t step = 0; // which message of the operation between these two ranks
  uint32_t payload_tag = 0;
  uint64_t group = 0;
  uint64_t key = 0; // of the operation within the group
  uint64_t bytes = 0; // of data, inline or separate
  double scale = 1.0; // the sender's weight for this receiver
  Signature signature;
};
static_assert(std::is_trivially_copyable_v<Header>);

} // namespace fog::mpi
