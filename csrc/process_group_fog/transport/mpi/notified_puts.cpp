#include "transport/mpi/notified_puts.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include <c10/util/Exception.h>

#include "core/failure.hpp"
#include "transport/mpi/put_slots.hpp"
#include "transport/shared_memory/shared_tensors.hpp"

namespace fog::mpi {
namespace {

// Limit of transfers whose receivers have not taken everything.
constexpr size_t kCredits = 1024;

} // namespace

size_t OutgoingPut::sent() const {
  return copy_ || done_ ? bytes_ : std::min(bytes_, chunks_put_ * kChunkBytes);
}

NotifiedPuts::NotifiedPuts(RemoteMemory& memory, tcp::Messages& wire) : memory_(memory), wire_(wire) {
  credits_ = static_cast<char*>(memory.allocate(kCredits * kLine));
  for (size_t i = 0; credits_ != nullptr && i < kCredits; ++i) {
    new (&credit(i)) std::atomic<uint64_t>(0);
    free_credits_.push_back(i);
  }
}

bool NotifiedPuts::reaches(PeerId peer) const {
  const auto found = granted_.find(peer);
  return credits_ != nullptr && memory_.reaches(peer) && (found == granted_.end() || found->second.state != Granted::State::kRefused);
}

std::shared_ptr<OutgoingPut> NotifiedPuts::send(
    PeerId peer,
    Header header,
    const void* data,
    bool may_be_overwritten,
    const std::shared_ptr<TransferOwner>& owner,
    tcp::Sent ended) {
  auto& granted = granted_[peer];
  if (free_credits_.empty() || chunks_of(header.bytes) >= kAll || granted.state == Granted::State::kRefused) {
    return nullptr;
  }
  auto put = std::make_shared<OutgoingPut>();
  put->peer_ = peer;
  put->data_ = static_cast<const char*>(data);
  put->bytes_ = header.bytes;
  put->may_be_overwritten_ = may_be_overwritten;
  if (granted.state == Granted::State::kHas && !place(*put, granted)) {
    return nullptr;
  }
  put->transfer_ = next_transfer_++;
  put->credit_ = free_credits_.back();
  free_credits_.pop_back();
  put->owner_ = owner;
  put->ended_ = std::move(ended);
  put->tag_ = wire_.next_tag(peer);
  header.delivery = Delivery::kRemote;
  const auto credit_at = *memory_.address_of(&credit(put->credit_), sizeof(uint64_t));
  header.put = {put->transfer_, credit_at, static_cast<uint32_t>(put->first_slot_), static_cast<uint32_t>(put->slots_)};
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
    std::fill_n(granted.taken.begin() + static_cast<ptrdiff_t>(put->first_slot_), put->slots_, false);
    free_credits_.push_back(put->credit_);
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
  resting_.remove_if([this](const auto& resting) { return settle(*resting); });
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
  std::fill_n(granted.taken.begin() + static_cast<ptrdiff_t>(put.first_slot_), put.slots_, true);
  return put.slots_ > 0;
}

void NotifiedPuts::say_placed(const OutgoingPut& put) {
  Header header;
  header.kind = MessageKind::kPlaced;
  header.put = {put.transfer_, 0, static_cast<uint32_t>(put.first_slot_), static_cast<uint32_t>(put.slots_)};
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
  wire_.send_data(put->peer_, put->tag_, data, put->bytes_, put->owner_, ended);
  put->ended_ = nullptr; // it holds the sender, which holds the put
  if (const auto owner = std::exchange(put->owner_, nullptr)) {
    owner->on_progress();
  }
  resting_.push_back(put); // until its receiver has sent the final credit
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
  if (header.lent.slots > kMostSlots || header.lent.address % kLine != 0) {
    refuse_message(source, sizeof(header), "there are no such slots");
  }
  granted.at = header.lent.address;
  granted.taken.assign(header.lent.slots, false);
  granted.state = header.lent.slots > 0 ? Granted::State::kHas : Granted::State::kRefused;
  for (const auto& put : std::exchange(granted.waiting, {})) {
    if (put->done_) { // withdrawn: only the receiver's final credit is missing
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

bool NotifiedPuts::step(OutgoingPut& put) {
  const auto& granted = granted_[put.peer_];
  const size_t chunks = chunks_of(put.bytes_);
  const uint64_t word = credit(put.credit_).load(std::memory_order_acquire);
  size_t taken = 0;
  if (word >> kCountBits == put.transfer_) {
    taken = word & kAll;
    if (taken == kAll) { // the receiver does not want the rest
      end(put, "");
      return true;
    }
  }
  const auto may_go = [&] { return put.chunks_put_ < chunks && put.chunks_put_ < taken + put.slots_; };
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

bool NotifiedPuts::settle(const OutgoingPut& put) {
  if (credit(put.credit_).load(std::memory_order_acquire) != word_of(put.transfer_, kAll)) {
    return false;
  }
  if (const auto found = granted_.find(put.peer_); found != granted_.end() && put.slots_ > 0) {
    std::fill_n(found->second.taken.begin() + static_cast<ptrdiff_t>(put.first_slot_), put.slots_, false);
  }
  free_credits_.push_back(put.credit_);
  return true;
}

void NotifiedPuts::withdraw(const TransferOwner& owner) {
  for (auto& [peer, granted] : granted_) {
    for (auto position = granted.waiting.begin(); position != granted.waiting.end();) {
      if ((*position)->owner_.get() == &owner) {
        end(**position, std::nullopt);
        resting_.push_back(std::move(*position));
        position = granted.waiting.erase(position);
      } else {
        ++position;
      }
    }
  }
  for (auto position = going_.begin(); position != going_.end();) {
    const auto next = std::next(position);
    if ((*position)->owner_.get() == &owner) {
      end(**position, std::nullopt);
      resting_.splice(resting_.end(), going_, position);
    }
    position = next;
  }
}

void NotifiedPuts::forget(PeerId peer) {
  const auto drop = [this, peer](const std::shared_ptr<OutgoingPut>& put) {
    if (put->peer_ != peer) {
      return false;
    }
    if (!put->done_) {
      end(*put, std::nullopt);
    }
    return true; // its credit is not reused: a host that is only silent may still write there
  };
  going_.remove_if(drop);
  resting_.remove_if(drop);
  if (const auto found = granted_.find(peer); found != granted_.end()) {
    for (const auto& put : found->second.waiting) {
      drop(put);
    }
    granted_.erase(found);
  }
}

bool NotifiedPuts::poll() {
  bool progressed = false;
  // One chunk per round, so that the engine's lock is free between two chunks. Transfers take turns.
  for (size_t left = going_.size(); left > 0 && !progressed; --left) {
    const auto put = going_.front();
    attempt(*put, [&] { progressed = step(*put); });
    auto& next = put->done_ ? resting_ : going_;
    next.splice(next.end(), going_, going_.begin());
  }
  resting_.remove_if([this](const auto& put) { return settle(*put); });
  return progressed;
}

void NotifiedPuts::give_up() {
  lost_.splice(lost_.end(), going_);
  for (auto& [peer, granted] : granted_) {
    lost_.insert(lost_.end(), granted.waiting.begin(), granted.waiting.end());
    granted.waiting.clear();
  }
}

} // namespace fog::mpi
