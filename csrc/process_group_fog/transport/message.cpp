#include "transport/message.hpp"

#include <cstring>

#include <c10/util/Exception.h>

#include "transport/shared_memory/inbox.hpp"

namespace fog {
namespace {

using shared_memory::Inbox;

// No tensor is larger: no machine has such a large address space.
constexpr uint64_t kMostBytes = uint64_t(1) << 57;

// Returns the fault of a header that is followed by `came` bytes, or nullptr if it is valid.
const char* fault_of(const Header& header, size_t came, bool local) {
  if (header.bytes > kMostBytes) {
    return "no data is so long";
  }
  switch (header.kind) {
    case MessageKind::kTaken:
    case MessageKind::kWanted:
      if (!local) { // of data that is put
        return came != 0 || header.bytes != 0 || header.delivery != Delivery::kInline ? "it carries data" : nullptr;
      }
      [[fallthrough]];
    case MessageKind::kFilled:
    case MessageKind::kEmptied:
      if (header.shared.chunk >= Inbox::kChunks) {
        return "its sender has no such chunk";
      }
      return !local ? "no other host can send this" : came != 0 ? "it carries data" : nullptr;
    case MessageKind::kSlots:
    case MessageKind::kPlaced:
      if (local) {
        return "only other hosts send this";
      }
      [[fallthrough]];
    case MessageKind::kConfirm:
    case MessageKind::kAsk:
    case MessageKind::kClosed:
    case MessageKind::kGoodbye:
    case MessageKind::kGoodbyeTaken:
    case MessageKind::kHold:
    case MessageKind::kRelease:
      return came != 0 || header.bytes != 0 || header.delivery != Delivery::kInline ? "it carries data" : nullptr;
    case MessageKind::kAnswer:
    case MessageKind::kError:
      return header.delivery != Delivery::kInline || came != header.bytes ? "its text is not all there" : nullptr;
    case MessageKind::kMembership: {
      const auto& its = header.membership;
      if (header.delivery != Delivery::kInline || its.whole > OfMembership::kMostBytes || its.begin > its.whole ||
          header.bytes > its.whole - its.begin) {
        return "it is no part of a message";
      }
      break;
    }
    case MessageKind::kWindow:
    case MessageKind::kWindowReply:
      if (header.window.op > WindowOp::kLeave) {
        return "there is no such operation on a window";
      }
      if (header.delivery != Delivery::kInline && header.delivery != Delivery::kPayload && header.delivery != Delivery::kFragments) {
        return "the data of windows does not come so";
      }
      if (header.kind == MessageKind::kWindowReply && header.window.failed != 0 && header.delivery != Delivery::kInline) {
        return "its text is not all there";
      }
      break;
    case MessageKind::kFragment:
      return !local ? "no other host can send this" : came != header.bytes ? "its data has another length" : nullptr;
    case MessageKind::kData:
    case MessageKind::kPointToPoint:
      if (header.delivery == Delivery::kFragments) {
        return "its data cannot come so";
      }
      break;
    default:
      return "there is no such kind";
  }
  switch (header.delivery) {
    case Delivery::kInline:
      return came != header.bytes ? "its data has another length" : nullptr;
    case Delivery::kPayload:
      return came != 0 || header.payload_tag == 0 || header.bytes == 0 ? "its data cannot come so" : nullptr;
    case Delivery::kRemote:
      return local                                                    ? "only other hosts send this"
          : came != 0 || header.payload_tag == 0 || header.bytes == 0 ? "its data cannot come so"
                                                                      : nullptr;
    case Delivery::kStream:
    case Delivery::kMapped:
    case Delivery::kFragments:
      return !local ? "no other host can send this" : came != 0 ? "it carries data" : nullptr;
  }
  return "its data cannot come so";
}

} // namespace

void refuse_message(int source, size_t length, const char* why) {
  C10_THROW_ERROR(
      DistBackendError,
      c10::str(
          "fog: rank ", source, " of the world sent ", length, " bytes that are not a message of fog: ", why,
          ". Is its memory damaged?"));
}

Header checked_header(int source, const char* record, size_t length, bool local) {
  if (length < sizeof(Header)) {
    refuse_message(source, length, "it is shorter than a header");
  }
  Header header;
  std::memcpy(&header, record, sizeof(header));
  if (const char* fault = fault_of(header, length - sizeof(header), local)) {
    refuse_message(source, length, fault);
  }
  return header;
}

} // namespace fog
