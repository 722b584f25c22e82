#include "backend/protocol.hpp"

#include <cstddef>
#include <sstream>

#include <torch/version.h>

#include "transport/shared_memory/arena.hpp"
#include "transport/shared_memory/inbox.hpp"
#include "windows/window_memory.hpp"
#include "transport/message.hpp"

namespace fog {
namespace {

// Increased with each change of the messages between processes, or of their use of each other's memory, that leaves all
// sizes unchanged.
constexpr int kProtocol = 13;

uint32_t layout() {
  using namespace shared_memory;
  uint64_t hash = kEmptyHash;
  for (const size_t number :
       {sizeof(Header),
        offsetof(Header, bytes),
        offsetof(Header, operation),
        offsetof(Header, shared),
        offsetof(OfOperation, signature),
        sizeof(OfWindow),
        sizeof(OfMembership),
        sizeof(Signature),
        offsetof(Signature, shape),
        offsetof(Signature, plan),
        offsetof(Signature, codec),
        sizeof(Ring),
        Ring::kCapacity,
        sizeof(Doorbell),
        sizeof(Pulse),
        Inbox::bytes_for(1),
        Inbox::bytes_for(1000),
        sizeof(Arena::Label),
        sizeof(WindowLabel),
        sizeof(SlotPlace),
        sizeof(PeerControl),
        sizeof(PairMutex),
        size_t(Slot::kWriters),
        size_t(Slot::kOwners),
        static_cast<size_t>(MessageKind::kMembership),
        static_cast<size_t>(Delivery::kFragments),
        static_cast<size_t>(OpKind::kAgree)}) {
    hash = hash_more(hash, static_cast<int64_t>(number));
  }
  return mark(hash);
}

std::string version = "of no version";

} // namespace

void set_version(const std::string& its_version) {
  version = its_version;
}

std::string protocol() {
  const std::string torch = TORCH_VERSION;
  std::ostringstream text;
  text << "fog " << version << " (protocol " << kProtocol << ", layout " << std::hex << layout() << "), torch "
       << torch.substr(0, torch.find('+'));
  return text.str();
}

} // namespace fog
