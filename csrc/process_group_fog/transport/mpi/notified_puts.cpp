#include "transport/mpi/notified_puts.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include <c10/util/Exception.h>

#include "core/failure.hpp"
#include "transport/shared_memory/shared_tensors.hpp"

namespace fog::mpi {
namespace {

// The layout of slots and versions that sender and receiver of notified puts share, and the format of their words.

// A slot holds a chunk.
constexpr size_t kChunkBytes = RemoteMemory::kMostBytes;

// A peer lends at most this many.
constexpr size_t kMostSlots = 32;

// A version is one word: the number of a transfer and a number of its chunks.
constexpr unsigned kCountBits = 20;
constexpr uint32_t kAll = (uint32_t(1) << kCountBits) - 1; // stands for all chunks, including any that follow
constexpr uint64_t word_of(uint64_t transfer, uint64_t chunks) {
  return transfer << kCountBits | chunks;
}

constexpr size_t chunks_of(size_t bytes) {
  return (bytes + kChunkBytes - 1) / kChunkBytes;
}

// Slots come after their versions. Each version has its own cache line.
constexpr size_t kVersionStride = 64;
constexpr size_t versions_bytes(size_t slots) {
  return (slots * kVersionStride + 4095) / 4096 * 4096;
}
constexpr size_t version_at(size_t slot) {
  return slot * kVersionStride;
}
constexpr size_t slot_at(size_t slots, size_t slot) {
  return versions_bytes(slots) + slot * kChunkBytes;
}

} // namespace

size_t OutgoingPut::sent() const {
  return copy_ || done_ ? bytes_ : std::min(bytes_, chunks_put_ * kChunkBytes);
}

NotifiedPuts::NotifiedPuts(RemoteMemory& memory, tcp::Messages& wire) : memory_(memory), wire_(wire) {}

bool NotifiedPuts::reaches(PeerId peer) const {
  const auto found = granted_.find(peer);
  return memory_.reaches(peer) && (found == granted_.end() || found->second.state != Granted::State::kRefused);
}

std::shared_ptr<OutgoingPut> NotifiedPuts::send(
    PeerId peer,
    Header header,
    const void* data,
    bool may_be_overwritten,
    const std::shared_ptr<TransferOwner>& owner,
    tcp::Sent ended) {
  auto& granted = granted_[peer];
  if (chunks_of(header.bytes) >= kAll || granted.state == Granted::State::kRefused) {
    return nullptr;
  }
  auto put = std::make_shared<OutgoingPut>();
  put->peer_ = peer;
  put->data_ = static_cast<const char*>(data);
  put->bytes_ = header.bytes;
  put->may_be_overwritten_ = may_be_overwritten;
  put->wanted_ = memory_.completes_alone();
  if (granted.state == Granted::State::kHas && !place(*put, granted)) {
    return nullptr;
  }
  put->transfer_ = next_transfer_++;
  puts_.emplace(put->transfer_, put);
  put->owner_ = owner;
  put->ended_ = std::move(ended);
  put->tag_ = wire_.next_tag(peer);
  header.delivery = Delivery::kRemote;
  header.put = {put->transfer_, static_cast<uint32_t>(put->first_slot_), static_cast<uint32_t>(put->slots_), 0};
  header.payload_tag = put->tag_;
  if (granted.state == Granted::State::kHas) {
    going_.push_back(put);
  } else {
    granted.state = Granted::State::kAsked;
    granted.waiting.push_back(put);
  }
  try {
    wire_.send(peer, header, nullptr, 0);
  } catch (...) { // the receiver does not know of it
    put->ended_ = nullptr;
    put->owner_ = nullptr;
    set_taken(*put, granted, false);
    puts_.erase(put->transfer_);
    auto& waiting = granted.waiting;
    going_.remove(put);
    waiting.erase(std::remove(waiting.begin(), waiting.end(), put), waiting.end());
    if (granted.state == Granted::State::kAsked && waiting.empty()) {
      granted.state = Granted::State::kNone;
    }
    throw;
  }
  return put;
}

bool NotifiedPuts::place(OutgoingPut& put, Granted& granted) {
  const size_t slots = granted.taken.size();
  const auto free = static_cast<size_t>(std::count(granted.taken.begin(), granted.taken.end(), false));
  // Leaves some free slots, so that the next transfer does not have to wait for this one.
  const size_t wanted = std::min(chunks_of(put.bytes_), std::max<size_t>(free / 2, 1));
  for (size_t begin = 0; begin < slots;) {
    size_t end = begin;
    while (end < slots && !granted.taken[end] && end - begin < wanted) {
      ++end;
    }
    if (end - begin > put.slots_) {
      put.first_slot_ = begin;
      put.slots_ = end - begin;
    }
    begin = std::max(end, begin + 1);
  }
  set_taken(put, granted, true);
  return put.slots_ > 0;
}

void NotifiedPuts::set_taken(const OutgoingPut& put, Granted& granted, bool taken) {
  std::fill_n(granted.taken.begin() + static_cast<ptrdiff_t>(put.first_slot_), put.slots_, taken);
}

void NotifiedPuts::say_placed(const OutgoingPut& put) {
  Header header;
  header.kind = MessageKind::kPlaced;
  header.put = {put.transfer_, static_cast<uint32_t>(put.first_slot_), static_cast<uint32_t>(put.slots_), 0};
  wire_.send(put.peer_, header, nullptr, 0);
}

void NotifiedPuts::go_by_wire(const std::shared_ptr<OutgoingPut>& put) {
  say_placed(*put);
  const void* data = put->data_;
  if (put->may_be_overwritten_) {
    put->copy_ = shared_allocator().allocate(put->bytes_);
    std::memcpy(put->copy_.get(), data, put->bytes_);
    data = put->copy_.get();
  }
  // `put` holds the copy, and the callback holds `put`.
  const auto ended = [put, ended = put->ended_](const std::string& error) {
    put->done_ = true;
    ended(error);
  };
  wire_.send_data(put->peer_, put->tag_, data, put->bytes_, put->owner_, ended, tcp::Messages::Early::kNothing);
  put->ended_ = nullptr; // it holds the sender, which holds the put
  if (const auto owner = std::exchange(put->owner_, nullptr)) {
    owner->on_progress();
  }
}

template <typename Act>
void NotifiedPuts::attempt(OutgoingPut& put, Act&& act) {
  try {
    act();
  } catch (const Unreachable&) { // the waiting operation is told of the loss
    end(put, std::nullopt);
  } catch (const std::exception& failure) {
    if (memory_.broken()) {
      throw;
    }
    end(put, message_of(failure));
  }
}

void NotifiedPuts::on_slots(PeerId source, const Header& header) {
  auto& granted = granted_[source];
  if (granted.state != Granted::State::kAsked) {
    refuse_message(source, sizeof(header), "this rank has not asked for its slots");
  }
  if (header.lent.slots > kMostSlots || header.lent.address % kVersionStride != 0) {
    refuse_message(source, sizeof(header), "there are no such slots");
  }
  granted.at = header.lent.address;
  granted.taken.assign(header.lent.slots, false);
  granted.state = header.lent.slots > 0 ? Granted::State::kHas : Granted::State::kRefused;
  for (const auto& put : std::exchange(granted.waiting, {})) {
    if (put->done_) { // withdrawn
      continue;
    }
    attempt(*put, [&] {
      if (granted.state == Granted::State::kHas && place(*put, granted)) {
        say_placed(*put);
        going_.push_back(put);
      } else {
        go_by_wire(put);
      }
    });
  }
}

std::shared_ptr<OutgoingPut> NotifiedPuts::find(PeerId peer, uint64_t transfer) const {
  const auto found = puts_.find(transfer);
  return found == puts_.end() || found->second->peer_ != peer ? nullptr : found->second;
}

void NotifiedPuts::on_wanted(PeerId source, const Header& header) {
  if (const auto put = find(source, header.put.transfer)) {
    put->wanted_ = true;
  }
}

void NotifiedPuts::on_taken(PeerId source, const Header& header) {
  const auto put = find(source, header.put.transfer);
  if (!put || header.put.taken < kAll) {
    if (put) {
      put->chunks_taken_ = header.put.taken;
    }
    return;
  }
  if (!put->done_ && put->slots_ > 0) { // the receiver does not want the rest
    end(*put, "");
  }
  set_taken(*put, granted_[source], false);
  puts_.erase(header.put.transfer);
}

bool NotifiedPuts::step(OutgoingPut& put) {
  const auto& granted = granted_[put.peer_];
  const size_t chunks = chunks_of(put.bytes_);
  const auto may_go = [&] { return put.wanted_ && put.chunks_put_ < chunks && put.chunks_put_ < put.chunks_taken_ + put.slots_; };
  const auto slot_of = [&](size_t chunk) { return put.first_slot_ + chunk % put.slots_; };
  const auto version_of = [&](size_t chunk) { return granted.at + version_at(slot_of(chunk)); };
  if (!may_go()) {
    return false;
  }
  // The version of the previous chunk goes together with this chunk's data, which saves a flush.
  const size_t chunk = put.chunks_put_;
  const uint64_t before = word_of(put.transfer_, chunk);
  if (put.chunks_published_ < chunk) {
    memory_.put(put.peer_, version_of(chunk - 1), &before, sizeof(before));
  }
  const size_t begin = chunk * kChunkBytes;
  memory_.put(
      put.peer_, granted.at + slot_at(granted.taken.size(), slot_of(chunk)), put.data_ + begin,
      std::min(kChunkBytes, put.bytes_ - begin));
  memory_.flush(put.peer_);
  put.chunks_published_ = chunk;
  ++put.chunks_put_;
  if (!may_go()) {
    memory_.notify(put.peer_, version_of(chunk), word_of(put.transfer_, chunk + 1));
    put.chunks_published_ = chunk + 1;
  }
  if (put.chunks_published_ == chunks) {
    end(put, "");
  } else if (put.may_be_overwritten_) {
    put.owner_->on_progress();
  }
  return true;
}

void NotifiedPuts::end(OutgoingPut& put, const std::optional<std::string>& error) {
  put.done_ = true;
  if (const auto ended = std::exchange(put.ended_, nullptr); ended && error) { // not kept, because it holds the sender
    ended(*error);
  }
  if (put.owner_) {
    released_.push_back(std::move(put.owner_)); // to be released without the lock
  }
}

void NotifiedPuts::withdraw(const TransferOwner& owner) {
  for (const auto& [transfer, put] : puts_) {
    if (put->owner_.get() == &owner) {
      end(*put, std::nullopt);
    }
  }
}

void NotifiedPuts::forget(PeerId peer) {
  for (auto position = puts_.begin(); position != puts_.end();) {
    auto& put = *position->second;
    if (put.peer_ == peer && !put.done_) {
      end(put, std::nullopt);
    }
    position = put.peer_ == peer ? puts_.erase(position) : std::next(position);
  }
  granted_.erase(peer);
}

bool NotifiedPuts::poll() {
  bool progressed = false;
  // One chunk per round, so that the engine's lock is free between two chunks. Transfers take turns.
  for (size_t left = going_.size(); left > 0 && !progressed; --left) {
    const auto put = going_.front();
    going_.pop_front();
    if (!put->done_) {
      attempt(*put, [&] { progressed = step(*put); });
    }
    if (!put->done_) {
      going_.push_back(put);
    }
  }
  return progressed;
}

void NotifiedPuts::give_up() {
  lost_ = std::exchange(puts_, {});
  going_.clear();
  for (auto& [peer, granted] : granted_) {
    granted.waiting.clear();
  }
}

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
