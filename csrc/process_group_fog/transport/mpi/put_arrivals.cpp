#include "transport/mpi/put_arrivals.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include <c10/util/Exception.h>

#include "core/failure.hpp"
#include "transport/mpi/put_slots.hpp"

namespace fog::mpi {
namespace {

// A peer gets at most this part of the free pool.
constexpr size_t kPartOfPool = 4;
// All peers together get at most this part of the pool; the rest is for windows.
constexpr size_t kPartForSlots = 2;

} // namespace

// The data of one transfer from a peer.
class PutArrivals::Arrival final : public Incoming {
 public:
  Arrival(PutArrivals& arrivals, PeerId its_source, const Header& its_header)
      : source(its_source), header(its_header), all_(arrivals) {}

  size_t available() const override {
    return payload ? payload->available() : std::min<size_t>(header.bytes, come_ * kChunkBytes);
  }
  void read(size_t from, size_t to, std::vector<Block>& blocks) const override {
    if (payload) {
      payload->read(from, to, blocks);
      return;
    }
    while (from < to) {
      const size_t chunk = from / kChunkBytes;
      const size_t end = std::min(to, (chunk + 1) * kChunkBytes);
      blocks.push_back({from, end, lent_.memory + slot_at(lent_.slots, slot_of(chunk)) + from % kChunkBytes});
      from = end;
    }
  }
  bool take(size_t bytes) override {
    if (payload) {
      const bool stands = payload->take(bytes);
      if (bytes == header.bytes) {
        all_.close(*this);
      }
      return stands;
    }
    if (bytes == header.bytes) {
      all_.close(*this);
    } else if (const size_t taken = bytes / kChunkBytes; taken > taken_) {
      const bool sender_waits = taken_ + slots_ < chunks_of(header.bytes);
      taken_ = taken;
      if (sender_waits) {
        all_.tell(*this, MessageKind::kTaken, taken);
      }
    }
    return true; // a slot is filled again only after its chunk was taken
  }

  // Sets the slots that hold its data.
  void place(const Lent& lent, size_t first, size_t slots) {
    lent_ = lent;
    first_ = first;
    slots_ = slots;
  }
  // Checks for arrived chunks. Returns true if there are new ones.
  bool look() {
    if (payload) {
      error = payload->error;
      return false;
    }
    const size_t before = come_;
    const size_t chunks = slots_ > 0 ? chunks_of(header.bytes) : 0;
    while (come_ < chunks && version_of(slot_of(come_)) == word_of(header.put.transfer, come_ + 1)) {
      ++come_;
    }
    return come_ > before;
  }

  const PeerId source;
  const Header header;
  std::shared_ptr<Incoming> payload; // set if its data comes by the wire after all
  bool goes_by_wire = false;
  bool listens = false; // an operation receives it
  std::weak_ptr<TransferOwner> listener;

 private:
  size_t slot_of(size_t chunk) const {
    return first_ + chunk % slots_;
  }
  uint64_t version_of(size_t slot) const {
    return reinterpret_cast<const std::atomic<uint64_t>*>(lent_.memory + version_at(slot))->load(std::memory_order_acquire);
  }

  PutArrivals& all_;
  Lent lent_;
  size_t first_ = 0;
  size_t slots_ = 0;
  size_t come_ = 0; // number of chunks
  size_t taken_ = 0;
};

void PutArrivals::grant(PeerId source) {
  auto& lent = lent_[source];
  size_t slots = kMostSlots;
  const auto region_bytes = [](size_t count) { return slot_at(count, count); };
  const size_t left = memory_.bytes() / kPartForSlots - lent_bytes_;
  while (slots > 0 && region_bytes(slots) > std::min(left, memory_.free_bytes() / kPartOfPool)) {
    slots /= 2;
  }
  if (slots > 0) {
    lent.memory = static_cast<char*>(memory_.allocate(region_bytes(slots)));
    lent.slots = lent.memory != nullptr ? slots : 0;
    lent_bytes_ += lent.slots > 0 ? region_bytes(slots) : 0;
  }
  Header header;
  header.kind = MessageKind::kSlots;
  header.lent.slots = static_cast<uint32_t>(lent.slots);
  if (lent.slots > 0) {
    std::memset(lent.memory, 0, versions_bytes(lent.slots));
    header.lent.address = *memory_.address_of(lent.memory, region_bytes(lent.slots));
  } else if (!std::exchange(warned_, true)) {
    TORCH_WARN(
        "fog: the pool for RMA has no room for the data of world rank ", source, ", which goes by TCP: ", memory_.free_bytes(),
        " bytes are free. FOG_RMA_BYTES sets its size.");
  }
  try {
    wire_.send(source, header, nullptr, 0);
  } catch (const Unreachable&) { // a peer that has ended needs no answer
  }
}

void PutArrivals::on_announcement(PeerId source, const Header& header) {
  const auto [position, added] = arrivals_.emplace(std::make_pair(source, header.put.transfer), nullptr);
  if (!added) {
    refuse_message(source, sizeof(header), "its data has come already");
  }
  position->second = std::make_shared<Arrival>(*this, source, header);
  if (header.put.slots > 0) {
    on_placed(source, header);
  } else if (lent_.count(source) == 0) {
    grant(source);
  }
}

void PutArrivals::on_placed(PeerId source, const Header& header) {
  const auto found = arrivals_.find({source, header.put.transfer});
  if (found == arrivals_.end()) { // the data is ignored
    return;
  }
  auto& arrival = *found->second;
  if (header.put.slots == 0) {
    arrival.goes_by_wire = true;
    if (const auto listener = arrival.listener.lock()) {
      take_by_wire(arrival, listener);
    }
    return;
  }
  const auto lent = lent_.find(source);
  if (lent == lent_.end() || header.put.slots > lent->second.slots || header.put.first_slot > lent->second.slots - header.put.slots) {
    refuse_message(source, sizeof(header), "it has no such slots");
  }
  arrival.place(lent->second, header.put.first_slot, header.put.slots);
}

void PutArrivals::take_by_wire(Arrival& arrival, const std::shared_ptr<TransferOwner>& owner) {
  auto header = arrival.header;
  header.delivery = Delivery::kPayload;
  arrival.payload = wire_.receive(arrival.source, header, nullptr, owner);
}

std::shared_ptr<Incoming> PutArrivals::receive(PeerId source, const Header& header, const std::shared_ptr<TransferOwner>& owner) {
  const auto found = arrivals_.find({source, header.put.transfer});
  if (found == arrivals_.end()) { // the peer was forgotten meanwhile
    throw Unreachable(source);
  }
  const auto arrival = found->second;
  arrival->listener = owner;
  arrival->listens = true;
  ++waiting_;
  if (arrival->goes_by_wire) {
    take_by_wire(*arrival, owner);
  } else if (!memory_.completes_alone()) {
    tell(*arrival, MessageKind::kWanted, 0);
  }
  arrival->look();
  return arrival;
}

void PutArrivals::tell(const Arrival& arrival, MessageKind kind, size_t taken) {
  Header header;
  header.kind = kind;
  header.put = {arrival.header.put.transfer, 0, 0, static_cast<uint32_t>(taken)};
  try {
    wire_.send(arrival.source, header, nullptr, 0);
  } catch (const Unreachable&) { // the sender has ended and does not wait any more
  }
}

void PutArrivals::close(Arrival& arrival) {
  const auto found = arrivals_.find({arrival.source, arrival.header.put.transfer});
  if (found == arrivals_.end()) {
    return;
  }
  const auto kept = found->second;
  arrivals_.erase(found);
  waiting_ -= arrival.listens ? 1 : 0;
  tell(arrival, MessageKind::kTaken, kAll);
}

void PutArrivals::ignore(PeerId source, const Header& header) {
  if (const auto found = arrivals_.find({source, header.put.transfer}); found != arrivals_.end()) {
    close(*found->second);
  }
}

template <typename Which>
void PutArrivals::close_all(Which&& which) {
  std::vector<std::shared_ptr<Arrival>> closed;
  for (const auto& [key, arrival] : arrivals_) {
    if (which(*arrival)) {
      closed.push_back(arrival);
    }
  }
  for (const auto& arrival : closed) {
    close(*arrival);
  }
}

void PutArrivals::abandon(const TransferOwner& owner) {
  close_all([&](const Arrival& arrival) { return arrival.listener.lock().get() == &owner; });
}

void PutArrivals::withdraw_group(uint64_t group) {
  close_all([group](const Arrival& arrival) { return arrival.header.group == group; });
}

void PutArrivals::forget(PeerId peer) {
  // Its slots remain allocated: a host that is only silent may still write there.
  for (auto position = arrivals_.lower_bound({peer, 0}); position != arrivals_.end() && position->first.first == peer;) {
    waiting_ -= position->second->listens ? 1 : 0;
    position = arrivals_.erase(position);
  }
}

bool PutArrivals::poll() {
  bool progressed = false;
  for (const auto& [key, arrival] : arrivals_) {
    if (arrival->listens && arrival->look()) {
      progressed = true;
      if (const auto owner = arrival->listener.lock()) {
        owner->on_progress();
      }
    }
  }
  return progressed;
}

void PutArrivals::give_up() {
  waiting_ = 0;
  arrivals_.clear();
}

} // namespace fog::mpi
