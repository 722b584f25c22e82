#include "transport/message.hpp"

#include "transport/shared_memory/inbox.hpp"

namespace fog {
namespace {

using shared_memory::Inbox;

// No tensor is larger: so many addresses has no machine.
constexpr uint64_t kMostBytes = uint64_t(1) << 57;

} // namespace

const char* fault_of(const Header& header, size_t came, bool local) {
  if (header.bytes > kMostBytes) {
    return "no data is so long";
  }
  switch (header.kind) {
    case MessageKind::kTaken:
    case MessageKind::kFilled:
    case MessageKind::kEmptied:
      return !local ? "no other host can send this" : came != 0 ? "it carries data" : nullptr;
    case MessageKind::kConfirm:
    case MessageKind::kClosed:
    case MessageKind::kGoodbye:
    case MessageKind::kGoodbyeTaken:
    case MessageKind::kHold:
    case MessageKind::kRelease:
      return came != 0 || header.bytes != 0 || header.delivery != Delivery::kInline ? "it carries data" : nullptr;
    case MessageKind::kError:
      return header.delivery != Delivery::kInline || came != header.bytes ? "its text is not all there" : nullptr;
    case MessageKind::kWindow:
    case MessageKind::kWindowReply:
      if (header.step > static_cast<uint16_t>(WindowOp::kLeave)) {
        return "there is no such operation on a window";
      }
      if (header.delivery != Delivery::kInline && header.delivery != Delivery::kPayload) {
        return "the data of windows does not come so";
      }
      if (header.kind == MessageKind::kWindowReply && header.offer != 0 && header.delivery != Delivery::kInline) {
        return "its text is not all there";
      }
      break;
    case MessageKind::kData:
    case MessageKind::kPointToPoint:
      break;
    default:
      return "there is no such kind";
  }
  switch (header.delivery) {
    case Delivery::kInline:
      return came != header.bytes ? "its data has another length" : nullptr;
    case Delivery::kPayload:
      return came != 0 || header.payload_tag == 0 ? "its data cannot come so" : nullptr;
    case Delivery::kStream:
      if (header.window >= Inbox::kWindows) {
        return "its sender has no such window";
      }
      [[fallthrough]];
    case Delivery::kOffer:
    case Delivery::kMapped:
      return !local                        ? "no other host can send this"
          : header.offer >= Inbox::kOffers ? "its sender has no such offer"
          : came != 0                      ? "it carries data"
                                           : nullptr;
  }
  return "its data cannot come so";
}

} // namespace fog
