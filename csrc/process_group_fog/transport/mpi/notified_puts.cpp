#include "transport/mpi/notified_puts.hpp"

#include <algorithm>
#include <cstring>

#include <c10/util/Exception.h>

#include "core/failure.hpp"
#include "transport/mpi/put_slots.hpp"
#include "transport/shared_memory/shared_tensors.hpp"

namespace fog::mpi {

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
  wire_.send_data(put->peer_, put->tag_, data, put->bytes_, put->owner_, ended);
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

} // namespace fog::mpi
