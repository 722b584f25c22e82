// How ProcessTransport sends: the way to each receiver.
#include <algorithm>
#include <cstring>

#include <c10/util/SmallVector.h>

#include "transport/process_transfers.hpp"
#include "transport/shared_memory/shared_tensors.hpp"

namespace fog {
bool ProcessTransport::holds_back(PeerId destination) const {
  constexpr size_t kMostUnsent = size_t(4) << 20;
  return held_.count(destination) > 0 || links_.unsent(destination) + wire_.unsent(destination) > kMostUnsent;
}

ProcessTransport::Way ProcessTransport::way_of(PeerId destination, const Header& header, const void* data, Memory memory) const {
  const bool hold = is_in_order(header) && header.bytes > 0 && holds_back(destination);
  const bool local = links_.reaches(destination);
  if (header.bytes <= kLocalInlineBytes && !hold) {
    return Way::kInline;
  }
  if (!local && memory != Memory::kMessages && is_in_order(header) && header.bytes > kInlineBytes && puts_ &&
      puts_->reaches(destination)) {
    return Way::kRemote; // held back or not: the data stays in its slots until it is taken
  }
  if (local && memory == Memory::kStays && links_.mapped_by(destination, data, header.bytes)) {
    return Way::kMapped;
  }
  return !local || !links_.attached_by(destination) ? Way::kPayload : memory == Memory::kMessages ? Way::kCopied : Way::kStream;
}

void ProcessTransport::send_header(PeerId peer, const Header& header, const void* data, size_t bytes) {
  if (links_.reaches(peer)) {
    links_.send(peer, header, data, bytes);
  } else {
    wire_.send(peer, header, data, bytes);
  }
}

Transport::Sent ProcessTransport::send(
    c10::ArrayRef<Destination> destinations,
    const Header& message,
    const void* data,
    Memory memory,
    const std::shared_ptr<TransferOwner>& owner) {
  auto header = message;
  Sent sent;
  c10::SmallVector<Way, 8> ways;
  std::vector<PeerId> readers;
  for (const auto& destination : destinations) {
    ways.push_back(way_of(destination.peer, header, data, memory));
    if (ways.back() == Way::kStream) {
      readers.push_back(destination.peer);
    }
  }
  std::shared_ptr<ToSeveral> outgoing;
  if (std::any_of(ways.begin(), ways.end(), [](Way way) { return way != Way::kInline; })) {
    sent.outgoing = outgoing = std::make_shared<ToSeveral>(header.bytes);
  }
  // Small data may change as soon as send() returns, so it is copied if it has to be held back. Data that may be
  // overwritten is copied for receivers whose progress the stream does not track; others read the original.
  const auto copied = [&, original = data] {
    if (!outgoing->copy) {
      outgoing->copy = shared_allocator().allocate(header.bytes);
      std::memcpy(outgoing->copy.get(), original, header.bytes);
    }
    return outgoing->copy.get();
  };
  if (outgoing && header.bytes <= kInlineBytes) {
    data = copied();
  }
  if (!readers.empty()) {
    outgoing->stream = streams_.open(readers, header.group, data, header.bytes, owner);
  }
  for (size_t i = 0; i < destinations.size(); ++i) {
    const auto& [peer, scale, wants_confirm] = destinations[i];
    header.scale = scale;
    header.wants_confirm = wants_confirm ? 1 : 0;
    header.delivery = Delivery::kInline;
    switch (ways[i]) {
      case Way::kInline:
        send_header(peer, header, data, header.bytes);
        break;
      case Way::kStream:
        streams_.announce(*outgoing->stream, header);
        links_.send(peer, header, nullptr, 0);
        break;
      case Way::kMapped:
        header.delivery = Delivery::kMapped;
        header.shared = {streams_.next_transfer(), reinterpret_cast<uintptr_t>(data), links_.inbox().withdrawals(), 0};
        if (wants_confirm) { // the kTaken message confirms it too
          header.wants_confirm = 0;
          sent.answered.push_back(peer);
        }
        outgoing->add(peer);
        mapped_.emplace(header.shared.transfer, Reading{outgoing, owner, peer});
        links_.send(peer, header, nullptr, 0);
        break;
      case Way::kCopied:
      case Way::kRemote:
      case Way::kPayload: {
        outgoing->add(peer);
        const auto ended = [outgoing, to = peer, owner = std::weak_ptr<TransferOwner>(owner)](const std::string& error) {
          if (!error.empty()) {
            outgoing->error = error;
            outgoing->failed_peer = to;
          }
          outgoing->remove(to);
          if (const auto alive = owner.lock()) {
            alive->on_progress();
          }
        };
        if (ways[i] == Way::kCopied) {
          copies_.send(peer, header, data, owner, [ended] { ended(""); });
          break;
        }
        if (ways[i] == Way::kRemote) {
          if (auto put = puts_->send(peer, header, data, memory == Memory::kOverwritten, owner, ended)) {
            outgoing->puts.push_back(std::move(put));
            break;
          }
        }
        const void* payload = memory == Memory::kOverwritten ? copied() : data;
        header.delivery = Delivery::kPayload;
        header.payload_tag = wire_.next_tag(peer);
        send_header(peer, header, nullptr, 0);
        wire_.send_data(peer, header.payload_tag, payload, header.bytes, owner, ended);
        break;
      }
    }
  }
  return sent;
}

} // namespace fog
